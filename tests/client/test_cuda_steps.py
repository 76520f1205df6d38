"""Steps timed by events, on a simulated stream: in order, in its own time, behind the CPU."""

from __future__ import annotations

from collections import deque
from typing import Any

from warpwatch.client.cuda_steps import DURATION, CudaSteps, device_uuid
from warpwatch.client.monitor import Monitor
from warpwatch.client.protocol import ABSENT
from warpwatch.client.steps import FIRST_PHASE, StepClock


class SimulatedEvent:
    """Like torch.cuda.Event: complete when the stream has come to it."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        self._cuda = cuda
        self.at_ms: float | None = None

    def record(self) -> None:
        assert not self._cuda.graph_capture
        self.at_ms = None
        self._cuda.queue.append(self)

    def query(self) -> bool:
        assert not self._cuda.graph_capture
        return self.at_ms is not None

    def elapsed_time(self, end: SimulatedEvent) -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


class SimulatedCuda:
    """Like the module torch.cuda: one stream of kernels (ms) and events."""

    def __init__(self) -> None:
        self.queue: deque[float | SimulatedEvent] = deque()
        self.now_ms = 0.0
        self.graph_capture = False
        self.memory_reads = 0

    def Event(self, enable_timing: bool) -> SimulatedEvent:
        assert enable_timing
        return SimulatedEvent(self)

    def is_current_stream_capturing(self) -> bool:
        return self.graph_capture

    def memory_stats_as_nested_dict(self) -> dict[str, Any]:
        self.memory_reads += 1
        return {"allocated_bytes": {"all": {"current": 7 << 30, "peak": 8 << 30}}}

    def launch(self, ms: float) -> None:
        self.queue.append(ms)

    def run(self, leave: int = 0) -> None:
        """Let the GPU work until ``leave`` entries are left."""
        while len(self.queue) > leave:
            entry = self.queue.popleft()
            if isinstance(entry, SimulatedEvent):
                entry.at_ms = self.now_ms
            else:
                self.now_ms += entry


def events_held(gpu: CudaSteps) -> int:
    """All events that are still known: free, in a step that waits, or the last step's end."""
    held = set(map(id, gpu._free)) | {id(mark.event) for mark in gpu._marks}
    for pending in gpu._pending:
        held |= {id(mark.event) for mark in pending.marks} | {id(pending.previous_end)}
    return len((held | {id(gpu._previous_end)}) - {id(None)})


class FinishedSteps(StepClock):
    """A clock that remembers what its steps came to."""

    __slots__ = ("finished",)

    def __init__(self) -> None:
        super().__init__()
        self.finished: list[tuple[int, int, int, list[int]]] = []

    def finish(
        self, flags: int, wall_ns: int, number: int, gpu_ns: int, allocated: int, spent: list[int]
    ) -> None:
        super().finish(flags, wall_ns, number, gpu_ns, allocated, spent)
        self.finished.append((number, gpu_ns, allocated, spent))


def simulated(pool_size: int = 512) -> tuple[SimulatedCuda, FinishedSteps, Monitor]:
    cuda = SimulatedCuda()
    clock = FinishedSteps()
    clock.gpu = CudaSteps(cuda, pool_size)
    clock.cuda, clock._gpu_tried = cuda, True
    return cuda, clock, Monitor(clock)


def step(cuda: SimulatedCuda, monitor: Monitor, between_ms: float = 0.0) -> None:
    cuda.launch(between_ms)
    with monitor.step():
        with monitor.phase("forward"):
            cuda.launch(30)
        with monitor.phase("backward"):
            cuda.launch(60)
        cuda.launch(10)


def test_steps_are_timed_between_their_end_events_on_the_stream() -> None:
    cuda, clock, monitor = simulated()
    for _ in range(3):
        step(cuda, monitor, between_ms=5)
        cuda.run()
    step(cuda, monitor)
    # The first has no step before it to be measured from: it is timed by the clock.
    number, gpu_ns, _, spent = clock.finished[1]
    assert (number, gpu_ns) == (1, 100_000_000)
    assert spent[DURATION] == 105_000_000
    assert spent[FIRST_PHASE:] == [30_000_000, 60_000_000]
    assert clock.finished[0][1] == ABSENT
    assert [found[0] for found in clock.finished] == [0, 1, 2]


def test_nothing_waits_for_a_gpu_that_is_behind() -> None:
    cuda, clock, monitor = simulated()
    for _ in range(4):
        step(cuda, monitor)
    assert [found[0] for found in clock.finished] == [0]
    cuda.run()
    step(cuda, monitor)
    assert [found[0] for found in clock.finished] == [0, 1, 2, 3]
    assert [found[1] for found in clock.finished[1:]] == [100_000_000] * 3
    assert clock.steps == 5
    assert clock.totals[0] == 4


def test_an_exhausted_pool_falls_back_to_the_clock_and_recovers() -> None:
    cuda, clock, monitor = simulated(pool_size=20)
    for _ in range(6):
        step(cuda, monitor)
    cuda.run()
    for _ in range(4):
        step(cuda, monitor)
        cuda.run()
    gpu = [found[1] for found in clock.finished]
    assert [found[0] for found in clock.finished] == list(range(9))
    assert gpu[0] == ABSENT and ABSENT in gpu[2:6]
    assert gpu[-1] == 100_000_000
    assert clock.gpu is not None
    assert events_held(clock.gpu) == 20


def test_no_event_leaks_over_many_steps_of_every_sort() -> None:
    cuda, clock, monitor = simulated(pool_size=40)
    for number in range(300):
        cuda.graph_capture = number % 7 == 3
        step(cuda, monitor)
        cuda.graph_capture = False
        cuda.run(leave=number % 5)
    assert clock.gpu is not None
    assert events_held(clock.gpu) == 40
    assert clock.totals[0] >= 290


def test_a_graph_capture_is_left_alone() -> None:
    cuda, clock, monitor = simulated()
    step(cuda, monitor)
    cuda.run()
    cuda.graph_capture = True
    step(cuda, monitor)
    cuda.graph_capture = False
    for _ in range(3):
        step(cuda, monitor)
        cuda.run()
    assert [found[1] == ABSENT for found in clock.finished] == [True, True, True, False]


def test_a_gpu_that_never_answers_costs_a_bounded_memory() -> None:
    cuda, clock, monitor = simulated(pool_size=2000)
    for _ in range(200):
        step(cuda, monitor)
    assert 130 <= len(clock.finished) <= 136
    assert {found[1] for found in clock.finished} == {ABSENT}


def test_memory_is_read_once_a_second_at_most() -> None:
    cuda, clock, monitor = simulated()
    for _ in range(50):
        step(cuda, monitor)
        cuda.run()
    assert cuda.memory_reads == 1
    assert [found[2] for found in clock.finished[:2]] == [7 << 30, ABSENT]


def test_the_exit_finishes_what_the_gpu_did_not() -> None:
    cuda, clock, monitor = simulated()
    for _ in range(3):
        step(cuda, monitor)
    assert clock.gpu is not None
    clock.gpu.harvest(clock, flush=True)
    assert [found[0] for found in clock.finished] == [0, 1, 2]
    assert clock.totals[0] == 3


def test_the_device_is_named_by_its_uuid() -> None:
    class Properties:
        uuid = "3a1c"

    class Cuda:
        def current_device(self) -> int:
            return 1

        def get_device_properties(self, index: int) -> Properties:
            return Properties()

    assert device_uuid(Cuda(), None) == "GPU-3a1c"
    assert device_uuid(Cuda(), "0,1") == "GPU-3a1c"
    assert device_uuid(Cuda(), "MIG-a, MIG-b") == "MIG-b"
