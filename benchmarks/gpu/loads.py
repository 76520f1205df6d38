"""Work of a known kind that keeps the GPU busy while something else is read."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.gpu.report import RunSetting

IDLE = "idle"
KINDS = (IDLE, "matmul", "copy_on_device", "host_to_device", "device_to_host")
# On a GPU, and on the CPU, where the loads themselves are tried.
_WIDTH, _SMALL_WIDTH = 8192, 128
_ROUNDS_AT_ONCE = 16
_STOP_TIMEOUT_S = 20.0


@dataclass(slots=True)
class Progress:
    """How many bytes a load has copied so far, and when they were counted."""

    copied_bytes: int = 0
    counted_at: float = 0.0


@contextlib.contextmanager
def running(kind: str, setting: RunSetting) -> Iterator[Progress]:
    """Warm at the begin of the block, ended at its end. Raises CannotCheck."""
    progress, stop = Progress(), threading.Event()
    if kind == IDLE:
        yield progress
        return
    setting.need_torch()
    work, bytes_a_round, synchronize = _work(kind, setting.device)

    def round_() -> None:
        for _ in range(_ROUNDS_AT_ONCE):
            work()
        synchronize()
        progress.copied_bytes += _ROUNDS_AT_ONCE * bytes_a_round
        progress.counted_at = time.monotonic()

    def work_on() -> None:
        while not stop.is_set():
            round_()

    round_()
    thread = threading.Thread(target=work_on, daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        stop.set()
        thread.join(_STOP_TIMEOUT_S)


def _work(kind: str, device: str) -> tuple[Callable[[], object], int, Callable[[], None]]:
    """One round, the bytes that it copies, and how to wait for it."""
    import torch

    cuda = device == "cuda"
    width = _WIDTH if cuda else _SMALL_WIDTH
    left, right = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    product, host = torch.empty_like(left), torch.empty_like(left, device="cpu", pin_memory=cuda)
    rounds: dict[str, Callable[[], object]] = {
        "matmul": lambda: torch.matmul(left, right, out=product),
        "copy_on_device": lambda: product.copy_(left),
        "host_to_device": lambda: product.copy_(host, non_blocking=True),
        "device_to_host": lambda: host.copy_(left, non_blocking=True),
    }
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    return rounds[kind], left.nbytes, synchronize
