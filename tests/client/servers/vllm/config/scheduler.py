"""The scheduler and its configuration with the names that the hooks use, as in vLLM 0.32."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any


class Scheduler:
    """Prompts first, a whole one per request; then one token per request and step."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.requests: dict[str, Any] = {}
        self.finished: list[str] = []
        self.preempted: set[str] = set()

    def add(self, name: str, prompt: int, tokens: int, arrival_time: float) -> None:
        self.requests[name] = SimpleNamespace(
            name=name, prompt=prompt, left=tokens, computed=0, made=0, arrival_time=arrival_time,
            events=[],
        )  # fmt: skip

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.requests), 0

    def get_kv_cache_usage(self) -> float:
        return 0.25

    def schedule(self, throttle_prefills: bool = False) -> Any:
        cached = [one for one in self.requests.values() if one.computed]
        new = [one for one in self.requests.values() if not one.computed]
        output = SimpleNamespace(
            total_num_scheduled_tokens=sum(one.prompt for one in new) + len(cached),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=one.name, num_computed_tokens=0) for one in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one.name for one in cached],
                num_output_tokens=[one.made for one in cached],
                num_computed_tokens=[one.computed for one in cached],
            ),
            scheduled_spec_decode_tokens={},
            preempted_req_ids=self.preempted,
        )
        self.preempted = set()
        for one in self.requests.values():
            one.computed += 1 if one.computed else one.prompt
        return output

    def update_from_output(self, scheduler_output: Any, model_output: Any) -> Mapping[int, Any]:
        outputs = []
        for one in (
            list(self.requests.values()) if scheduler_output.total_num_scheduled_tokens else ()
        ):
            stats = None if one.made else SimpleNamespace(num_prompt_tokens=one.prompt)
            outputs.append(SimpleNamespace(new_token_ids=[7], prefill_stats=stats))
            one.made += 1
            if one.made == one.left:
                del self.requests[one.name]
        stats = SimpleNamespace(prefix_cache_stats=SimpleNamespace(hits=3, queries=5))
        return {0: SimpleNamespace(outputs=outputs, scheduler_stats=stats)}


class SchedulerConfig:
    def get_scheduler_cls(self) -> type[Scheduler]:
        return Scheduler
