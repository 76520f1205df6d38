"""The scheduler with the names that the hooks use, as in SGLang 0.5.23."""

from types import SimpleNamespace
from typing import Any


def get_parallel() -> Any:
    return SimpleNamespace(tp_rank=0, pp_rank=1, dp_rank=1)


class Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_extend(self) -> bool:
        return self.name in ("extend", "mixed")


def batch(mode: str, requests: int, tokens: int = 0, decoding: int = 0, kv: int = 0) -> Any:
    return SimpleNamespace(
        forward_mode=Mode(mode),
        reqs=[None] * requests,
        extend_num_tokens=tokens,
        decoding_reqs=[None] * decoding or None,
        seq_lens_sum=kv or None,
    )


class Scheduler:
    def __init__(self, server_args: Any) -> None:
        self.server_args = server_args
        self.running_batch = batch("decode", 2)
        self.waiting_queue = [None]
        self.idle = True

    def is_fully_idle(self) -> bool:
        return self.idle

    def get_next_batch_to_run(self, running_batch: Any = None, last_batch: Any = None) -> None:
        """Do nothing."""

    def run_batch(self, batch: Any, pp_proxy_tensors: Any = None) -> str:
        return "result"

    def process_batch_result(self, batch: Any, result: Any) -> None:
        """Do nothing."""

    def on_idle(self) -> None:
        """Do nothing."""
