"""Keeps the GPU busy in one known way, and says what it has done.

    python -m benchmarks.gpu.loads KIND [cuda|cpu]

Prints a JSON line when it is warm, works until its input ends, and then prints what was done
since: begin and end by the monotonic clock, rounds, and the bytes that were moved or the
floating-point operations. ``KINDS`` names them all.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

KINDS = ("matmul", "copy_on_device", "host_to_device", "device_to_host", "idle")
WARM_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
_MATRIX, _SMALL_MATRIX = 8192, 128
_COPY_BYTES, _SMALL_COPY_BYTES = 2**30, 2**20
_ROUNDS_AT_ONCE = 4


class Load:
    """A load as a process. ``stop`` says what it has done."""

    def __init__(self, kind: str, device: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.loads", kind, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.kind = kind
        self.pid = self._process.pid
        self._line(WARM_TIMEOUT_S)

    def stop(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.close()
        done = self._line(STOP_TIMEOUT_S)
        self._process.wait(STOP_TIMEOUT_S)
        return done

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _line(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError(f"the load {self.kind} has not answered within {timeout_s:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the load {self.kind}: {answer['error']}")
        return answer


@contextlib.contextmanager
def running(kind: str, device: str) -> Iterator[Load]:
    """Warm at its begin; ended at its end, if it was not stopped before."""
    load = Load(kind, device)
    try:
        yield load
    finally:
        load.kill()


# --- in the load's own process ---


def _work(kind: str, device: str) -> tuple[Callable[[], Any], dict[str, float]]:
    """One round, and what it does: ``bytes`` moved or ``flop``."""
    import torch

    cuda = device == "cuda"
    if not cuda:
        torch.set_num_threads(1)
    if cuda and not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")
    size = _COPY_BYTES if cuda else _SMALL_COPY_BYTES
    if kind == "idle":
        # The context is there, as between two steps of a training.
        torch.zeros(1, device=device)
        return lambda: time.sleep(0.01), {}
    if kind == "matmul":
        n = _MATRIX if cuda else _SMALL_MATRIX
        left, right = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        product = torch.empty_like(left)
        return lambda: torch.matmul(left, right, out=product), {"flop": 2.0 * n**3}
    host = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
    ours = torch.empty(size, dtype=torch.uint8, device=device)
    if kind == "host_to_device":
        return lambda: ours.copy_(host, non_blocking=True), {"bytes": size}
    if kind == "device_to_host":
        return lambda: host.copy_(ours, non_blocking=True), {"bytes": size}
    other = torch.empty_like(ours)
    # Each byte is read and written.
    return lambda: other.copy_(ours), {"bytes": 2.0 * size}


def _synchronizer(device: str) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if device == "cuda" else (lambda: None)


def main(kind: str, device: str = "cuda") -> None:
    try:
        work, per_round = _work(kind, device)
        synchronize = _synchronizer(device)
        for _ in range(3):
            work()
        synchronize()
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:200]}), flush=True)
        return
    print(json.dumps({"warm": True}), flush=True)
    began, rounds = time.monotonic(), 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(_ROUNDS_AT_ONCE):
            work()
        rounds += _ROUNDS_AT_ONCE
        synchronize()
    done = {name: value * rounds for name, value in per_round.items()}
    print(json.dumps({"began": began, "ended": time.monotonic(), "rounds": rounds, **done}))


if __name__ == "__main__":
    main(*sys.argv[1:])
