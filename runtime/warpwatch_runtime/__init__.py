"""Provides the base of every process. It does not know GPUs, jobs or captures.

- loading: reads the configuration file and the environment; command_line: options of all commands
- supervisor: runs loops in threads
- call_guard: bounds calls that may never return; pause: backoff after failures
- files, directory: atomic writes, and folders that other users can change
- state_file: a value that survives a restart
- log_output: log lines; agent_metrics: the metrics of the process itself
- http_requests: requests to other servers; quantities: numbers with units as text
"""
