"""The engine with its worker in one process, step by step."""

from typing import Any

from vllm.config.scheduler import SchedulerConfig
from vllm.v1.worker.gpu_worker import CPUWorker


class LLMEngine:
    def __init__(self, vllm_config: Any, log_stats: bool = True) -> None:
        self.vllm_config, self.log_stats = vllm_config, log_stats
        self.worker = CPUWorker(vllm_config, 0, 0)
        self.scheduler = SchedulerConfig().get_scheduler_cls()(vllm_config)

    def add(self, name: str, prompt: int, tokens: int) -> None:
        self.scheduler.add(name, prompt, tokens, 0.0)

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.worker.execute_model(output)
        self.scheduler.update_from_output(output, self.worker.sample_tokens(None))
