"""Steps timed by events, on a simulated stream: in order, in its own time, behind the CPU."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from threading import Lock, Thread, get_ident
from typing import Any, NamedTuple

import pytest

from warpwatch import cuda_steps, protocol
from warpwatch.columns import DURATION
from warpwatch.cuda_steps import CudaSteps, device_uuid
from warpwatch.monitor import Monitor
from warpwatch.phase_times import END, FIRST_PHASE, START
from warpwatch.protocol import ABSENT
from warpwatch.ring import RingWriter
from warpwatch.steps import StepClock


class SimulatedStream(NamedTuple):
    """Compute has the queue of the simulation; of other streams nothing is known in order."""

    device_index: int
    compute: bool = True


class SimulatedEvent:
    """Like torch.cuda.Event: complete when the stream has come to it."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        self._cuda = cuda
        self.at_ms: float | None = None
        self.device: int | None = None

    def record(self, stream: SimulatedStream) -> None:
        assert not self._cuda.graph_capture
        # Made on the device where it is recorded first, and bound to it.
        self.device = stream.device_index if self.device is None else self.device
        assert self.device == stream.device_index
        self.at_ms = None
        if stream.compute:
            self._cuda.queue.append(self)
        else:
            self.at_ms = -1.0

    def query(self) -> bool:
        assert not self._cuda.graph_capture
        assert get_ident() == self._cuda.thread
        self._cuda.queries += 1
        return self.at_ms is not None

    def elapsed_time(self, end: SimulatedEvent) -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        if self.device != end.device:
            raise RuntimeError("events of two devices")
        return end.at_ms - self.at_ms


class SimulatedCuda:
    """Like the module torch.cuda: one stream of kernels (ms) and events."""

    def __init__(self) -> None:
        self.queue: deque[float | SimulatedEvent] = deque()
        self.now_ms = 0.0
        self.graph_capture = False
        self.memory_reads = 0
        self.statistics: dict[str, Any] = {
            "allocated_bytes": {"all": {"current": 7 << 30, "peak": 8 << 30}}
        }
        self.stream = SimulatedStream(0)
        self.thread = get_ident()
        self.queries = 0

    def Event(self, enable_timing: bool) -> SimulatedEvent:
        assert enable_timing
        return SimulatedEvent(self)

    def is_current_stream_capturing(self) -> bool:
        return self.graph_capture

    def memory_stats_as_nested_dict(self) -> dict[str, Any]:
        self.memory_reads += 1
        if not self.statistics:
            raise RuntimeError("this allocator has no statistics")
        return self.statistics

    def current_stream(self) -> SimulatedStream:
        return self.stream

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
    held = {id(event) for pool in gpu._pools.values() for event in pool}
    held |= {id(mark.event) for mark in gpu._marks}
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


def simulated(
    pool_size: int = 512, query_interval_ns: int = 0
) -> tuple[SimulatedCuda, FinishedSteps, Monitor]:
    cuda = SimulatedCuda()
    clock = FinishedSteps()
    clock.use_gpu(CudaSteps(cuda, pool_size, query_interval_ns))
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
    assert spent[FIRST_PHASE : FIRST_PHASE + 2] == [30_000_000, 60_000_000]
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


def test_a_gpu_that_is_behind_is_not_asked_at_every_step() -> None:
    cuda, clock, monitor = simulated(query_interval_ns=3_600_000_000_000)
    for _ in range(30):
        step(cuda, monitor)
    assert cuda.queries == 1
    cuda.run()
    assert clock.gpu is not None
    clock.gpu._query_ns = 0
    step(cuda, monitor)
    assert [found[0] for found in clock.finished] == list(range(30))


def test_the_exit_in_another_thread_asks_no_event() -> None:
    cuda, clock, monitor = simulated()
    for _ in range(3):
        step(cuda, monitor)
    cuda.run()
    assert clock.gpu is not None
    cuda.queries = 0
    thread = Thread(target=clock.gpu.harvest, args=(clock, True))
    thread.start()
    thread.join()
    assert cuda.queries == 0
    assert [found[:2] for found in clock.finished] == [(0, ABSENT), (1, ABSENT), (2, ABSENT)]


def test_a_side_stream_inside_a_step_does_not_mix_up_its_times() -> None:
    cuda, clock, monitor = simulated()
    for _ in range(3):
        with monitor.step():
            cuda.launch(30)
            cuda.stream = SimulatedStream(0, compute=False)
            with monitor.phase("comm"):
                pass
            cuda.stream = SimulatedStream(0)
            cuda.launch(70)
        cuda.run()
    with monitor.step():
        pass
    assert clock.finished[2][1] == 100_000_000
    assert clock.finished[2][3][DURATION : DURATION + 2] == [100_000_000, 0]


def test_another_device_has_events_of_its_own() -> None:
    cuda, clock, monitor = simulated(pool_size=20)
    devices = (0, 0, 1, 1, 1, 0, 0)
    for device in devices:
        cuda.stream = SimulatedStream(device)
        step(cuda, monitor)
        cuda.run()
    step(cuda, monitor)
    gpu_ns = [found[1] for found in clock.finished]
    # The first step on a device has no step before it there.
    known = [False, True, False, True, True, False, True]
    assert gpu_ns == [100_000_000 if measured else ABSENT for measured in known]
    assert clock.gpu is not None
    assert events_held(clock.gpu) == 40


def test_the_device_may_change_while_steps_wait() -> None:
    cuda, clock, monitor = simulated(pool_size=20)
    for device in (0, 0, 1, 0, 1, 1):
        cuda.stream = SimulatedStream(device)
        step(cuda, monitor)
    cuda.run()
    for _ in range(3):
        step(cuda, monitor)
        cuda.run()
    gpu_ns = [found[1] for found in clock.finished[:6]]
    assert gpu_ns == [ABSENT, 100_000_000, ABSENT, ABSENT, ABSENT, 100_000_000]
    assert clock.gpu is not None
    assert events_held(clock.gpu) == 40


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[RingWriter]:
    path = tmp_path / "test.ring"
    path.write_bytes(bytes(protocol.RING_SIZE))
    found = RingWriter(os.open(path, os.O_RDWR), "test")
    yield found
    found.close()


def records(ring: RingWriter, kind: int) -> list[bytes]:
    offsets = (
        protocol.record_offset(number) for number in range(1, ring.words[protocol.WORD_RECORDS] + 1)
    )
    found = [
        protocol.decode_record(bytes(ring._view[at : at + protocol.RECORD_SIZE])) for at in offsets
    ]
    return [record.payload for record in found if record.type == kind]


def read_memory(cuda: SimulatedCuda, clock: FinishedSteps, monitor: Monitor) -> None:
    """A step, as if the last reading were long ago."""
    assert clock.gpu is not None
    clock.gpu._memory_ns = -cuda_steps.MEMORY_INTERVAL_NS
    step(cuda, monitor)
    cuda.run()


class WatchedLock:
    """Notes that somebody tried to take it."""

    def __init__(self) -> None:
        self.tries = 0
        self._lock = Lock()

    def acquire(self, blocking: bool) -> bool:
        self.tries += 1
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()


def test_a_helper_that_may_not_settle_keeps_nobody_else_from_it() -> None:
    _, clock, _ = simulated()
    lock = clock._settling = WatchedLock()  # type: ignore[assignment]
    clock.settle(helping=True)
    assert lock.tries == 0


def test_a_gpu_that_comes_into_use_while_the_helper_settles_is_not_talked_to() -> None:
    cuda = SimulatedCuda()
    clock = FinishedSteps()

    class Log(list[Any]):
        def __getitem__(self, key: Any) -> Any:
            if clock.gpu is None:
                gpu = CudaSteps(cuda)
                clock.use_gpu(gpu)
                gpu.begin(DURATION)
            return super().__getitem__(key)

    monitor = Monitor(clock)
    with monitor.step():
        pass
    clock.log = Log([START, 1, None, END, 2, (0, 0, 0)])
    clock.settle()
    assert clock._totals[0] == 1 + 1
    assert len(cuda.queue) == 1


def test_an_oom_that_the_program_catches_is_told_once(ring: RingWriter) -> None:
    cuda, clock, monitor = simulated()
    clock.ring = ring
    for ooms in (0, 1, 1, 3):
        cuda.statistics = {**cuda.statistics, "num_ooms": ooms, "num_alloc_retries": 2 * ooms}
        read_memory(cuda, clock, monitor)
    told = [json.loads(payload) for payload in records(ring, protocol.RECORD_EVENT)]
    assert [event["event"] for event in told] == ["oom", "oom"]
    assert told[1]["detail"] == "2 failed allocations on the device"
    memory = protocol.MEMORY.unpack(records(ring, protocol.RECORD_MEMORY)[-1])
    # This allocator knows nothing of what it reserved or of pieces.
    assert memory == (7 << 30, ABSENT, 8 << 30, 6, 3, ABSENT)


def test_an_allocator_without_statistics_costs_no_step_and_is_not_asked_again(
    ring: RingWriter,
) -> None:
    cuda, clock, monitor = simulated()
    clock.ring = ring
    cuda.statistics = {}
    for _ in range(4):
        read_memory(cuda, clock, monitor)
    assert cuda.memory_reads == 1
    assert [found[:3] for found in clock.finished[1:]] == [
        (1, 100_000_000, ABSENT),
        (2, 100_000_000, ABSENT),
    ]
    assert records(ring, protocol.RECORD_MEMORY) == []
