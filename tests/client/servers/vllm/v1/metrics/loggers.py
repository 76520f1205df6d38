"""The logger of statistics with the names that the hooks use, as in vLLM 0.32."""

from typing import Any


class StatLoggerManager:
    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int | None = None,
    ) -> None:
        """Do nothing."""
