"""The base of every process of ours. It does not know GPUs, jobs or captures.

- config: reads the configuration file and the environment; command_line: options of all commands
- supervisor: runs loops in threads; loops: the interface for packages that need a loop
- call_guard: bounds calls that may never return; pause: backoff after failures
- files, directory: atomic writes, and folders that other users can change; open_files: their limit
- log_output: log lines; agent_metrics: the metrics of the process itself
- http_requests: requests to other servers; quantities: numbers with units as text
"""
