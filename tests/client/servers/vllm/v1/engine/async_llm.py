"""The front end of a server with the names that the hooks use, as in vLLM 0.32."""

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerManager


class AsyncLLM:
    def __init__(self, vllm_config: Any, log_stats: bool, client_index: int = 0) -> None:
        self.vllm_config, self.log_stats = vllm_config, log_stats
        self.logger_manager = StatLoggerManager() if log_stats else None
