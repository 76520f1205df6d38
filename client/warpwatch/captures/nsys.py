"""Kind nsys: for a process under Nsight Systems, the range of steps that it is to record.

``nsys profile --capture-range=cudaProfilerApi`` begins to record at cudaProfilerStart; each step
is an NVTX range. The report is Nsight's, so there is no file of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class NsysRecorder:
    """``cuda`` is torch.cuda, whose ``profiler`` raises what the CUDA runtime answers."""

    stops_anywhere = False

    def __init__(self, cuda: Any) -> None:
        self.events = self.size_bytes = 0
        self._profiler = cuda.profiler
        self._nvtx = cuda.nvtx
        self._started = False
        self._in_step = False

    def prepare(self) -> None:
        """Nothing: Nsight Systems is attached already."""

    def start(self, number: int) -> None:
        self._started = True
        self._profiler.start()
        self._enter_step(number)

    def next_step(self, number: int) -> None:
        self._leave_step()
        self._enter_step(number)

    def stop(self, about: dict[str, Any]) -> None:
        self.drop()

    def export(self, base: str) -> None:
        """Nothing."""

    def deliver(self, base: str, beat: Callable[[], None]) -> dict[str, Any]:
        return {}

    def drop(self) -> None:
        self._leave_step()
        if self._started:
            self._started = False
            self._profiler.stop()

    def discard(self, base: str) -> None:
        """Nothing."""

    def _enter_step(self, number: int) -> None:
        self._nvtx.range_push(f"step {number}")
        self._in_step = True

    def _leave_step(self) -> None:
        if self._in_step:
            self._in_step = False
            self._nvtx.range_pop()
