"""The numbers of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.idle_causes import CAUSES, Cause
from warpwatch_diagnosis.measures.intervals import Interval, Intervals, within


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step. Times in µs; those of the GPU are None and ``idle_us`` is empty without one.

    number: of ProfilerStep#number.
    """

    number: int
    begin_us: float
    end_us: float
    data_loading_us: float
    gpu_busy_us: float | None = None
    compute_us: float | None = None
    communication_us: float | None = None
    exposed_communication_us: float | None = None
    memory_copy_us: float | None = None
    idle_us: Mapping[Cause, float] = field(default_factory=dict)

    @property
    def duration_us(self) -> float:
        return self.end_us - self.begin_us


def step_times(
    numbers: Sequence[int], steps: Sequence[Interval], loading: Intervals, gpu: GpuTime | None
) -> tuple[StepTime, ...]:
    """``numbers``: of the steps; ``loading``: union of the DataLoader's iteration."""
    times = [
        StepTime(number, begin, end, load)
        for number, (begin, end), load in zip(numbers, steps, within(loading, steps), strict=True)
    ]
    if gpu is None:
        return tuple(times)
    busy, compute = within(gpu.busy, steps), within(gpu.compute, steps)
    communication = within(gpu.communication, steps)
    exposed, copies = within(gpu.exposed_communication, steps), within(gpu.copies, steps)
    causes = {cause: within(gpu.idle_time.by_cause[cause], steps) for cause in CAUSES}
    return tuple(
        replace(
            time,
            gpu_busy_us=busy[index],
            compute_us=compute[index],
            communication_us=communication[index],
            exposed_communication_us=exposed[index],
            memory_copy_us=copies[index],
            idle_us={cause: us[index] for cause, us in causes.items()},
        )
        for index, time in enumerate(times)
    )
