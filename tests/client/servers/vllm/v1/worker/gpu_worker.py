"""The worker with the names that the hooks use, as in vLLM 0.32."""

from typing import Any


class Worker:
    def __init__(self, vllm_config: Any, local_rank: int, rank: int) -> None:
        self.vllm_config, self.local_rank, self.rank = vllm_config, local_rank, rank

    def execute_model(self, scheduler_output: Any) -> Any:
        if getattr(scheduler_output, "fails", False):
            raise ValueError("the model fails")
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        return "tokens"


class CPUWorker(Worker):
    """A worker of another device, which inherits both methods."""
