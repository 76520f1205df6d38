"""Traces in memory with known times in µs, for the numbers alone."""

from typing import Any

import pytest

from warpwatch_diagnosis.intervals import intersection, total, union
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.host_events import CAUSES
from warpwatch_diagnosis.measures.measures import Measures, measure
from warpwatch_diagnosis.trace.events import Kind, TraceEvent
from warpwatch_diagnosis.trace.reader import Trace

MAIN = "77/77"
STREAM = "0/7"
# Times in a trace are far from 0. Golden files have them without whole seconds.
ORIGIN_US = 2_000_000_000.0


def assert_split(gpu: GpuTime) -> None:
    """The causes are disjoint and add up to the idle time."""
    parts = [span for cause in CAUSES for span in gpu.idle_time.of(cause)]
    near = 1e-6 * max(1.0, total(gpu.idle) + total(gpu.busy))
    assert total(parts) == pytest.approx(total(gpu.idle), abs=near)
    assert total(union(parts)) == pytest.approx(total(parts), abs=near)
    assert total(intersection(union(parts), gpu.busy)) <= near


class Timeline:
    """Steps of ``step_us`` from ORIGIN_US on; every time is counted from there."""

    def __init__(self, steps: int = 1, step_us: float = 10_000, device: str | None = None) -> None:
        self.trace = Trace("t.json", device_name=device)
        self._correlation = 0
        for step in range(steps):
            self.add("annotation", f"ProfilerStep#{step}", step * step_us, step_us)

    def add(
        self,
        kind: Kind,
        name: str,
        at_us: float,
        us: float,
        thread: str = MAIN,
        correlation: int | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        begin_us = ORIGIN_US + at_us
        event = TraceEvent(name, begin_us, begin_us + us, thread, correlation, arguments)
        self.trace.events[kind].append(event)

    def kernel(
        self,
        at_us: float,
        us: float,
        launched_us: float | None,
        name: str = "sm80_xmma_gemm",
        call: str = "cudaLaunchKernel",
        call_us: float = 5,
        stream: str = STREAM,
        arguments: dict[str, Any] | None = None,
        kind: Kind = "kernel",
    ) -> None:
        self._correlation += 1
        self.add(kind, name, at_us, us, stream, self._correlation, arguments)
        if launched_us is not None:
            self.add("runtime", call, launched_us, call_us, MAIN, self._correlation)

    def copy(
        self,
        at_us: float,
        us: float,
        launched_us: float,
        name: str = "Memcpy DtoH (Device -> Pageable)",
        call: str = "cudaMemcpyAsync",
        **more: Any,
    ) -> None:
        self.kernel(at_us, us, launched_us, name, call, kind="copy", **more)

    def measured(self) -> Measures:
        return measure(self.trace)

    def gpu(self) -> GpuTime:
        found = self.measured().gpu
        assert found is not None
        return found
