"""The collectors of metrics with the names that the hooks use, as in SGLang's main branch."""

from typing import Any


class SchedulerMetricsCollector:
    def log_stats(self, stats: Any) -> None: ...


class TokenizerMetricsCollector:
    def observe_time_to_first_token(self, labels: dict[str, str], value: float) -> float:
        return value

    def observe_inter_token_latency(
        self, labels: dict[str, str], internval: float, num_new_tokens: int
    ) -> int:
        return num_new_tokens
