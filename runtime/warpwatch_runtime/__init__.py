"""Provides the base of every process. It does not know GPUs, jobs or captures.

- loading: reads the configuration file and the environment; command_line: options of all commands
- supervisor: runs loops and calls that may never return in threads, with backoff after failures
- files, directory: atomic writes, values that survive a restart, folders of other users
- log_output: log lines; agent_metrics: the metrics of the process itself
- http_requests: requests to other servers; quantities: numbers with units as text
"""
