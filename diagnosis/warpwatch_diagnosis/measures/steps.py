"""The numbers of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.idle import CAUSES, Cause
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
    gpu_busy_us: float | None
    compute_us: float | None
    communication_us: float | None
    exposed_communication_us: float | None
    memory_copy_us: float | None
    idle_us: Mapping[Cause, float]

    @property
    def duration_us(self) -> float:
        return self.end_us - self.begin_us


def step_times(
    numbers: Sequence[int], steps: Sequence[Interval], loading: Intervals, gpu: GpuTime | None
) -> tuple[StepTime, ...]:
    """``numbers``: of the steps; ``loading``: union of the DataLoader's iteration."""
    loads = within(loading, steps)
    if gpu is None:
        return tuple(
            StepTime(number, begin, end, load, None, None, None, None, None, {})
            for number, (begin, end), load in zip(numbers, steps, loads, strict=True)
        )
    causes = {cause: within(gpu.idle_time.by_cause[cause], steps) for cause in CAUSES}
    busy, compute, communication, exposed, copies = (
        within(intervals, steps)
        for intervals in (
            gpu.busy,
            gpu.compute,
            gpu.communication,
            gpu.exposed_communication,
            gpu.copies,
        )
    )
    return tuple(
        StepTime(
            number=numbers[index],
            begin_us=begin,
            end_us=end,
            data_loading_us=loads[index],
            gpu_busy_us=busy[index],
            compute_us=compute[index],
            communication_us=communication[index],
            exposed_communication_us=exposed[index],
            memory_copy_us=copies[index],
            idle_us={cause: us[index] for cause, us in causes.items()},
        )
        for index, (begin, end) in enumerate(steps)
    )
