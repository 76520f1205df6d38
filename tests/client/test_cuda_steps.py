"""Steps timed by events, on a simulated stream: in order, in its own time, behind the CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple

import pytest

from tests.client.simulated_cuda import SimulatedCuda, SimulatedStream
from tests.manual_clock import ManualClock
from tests.waiting import DEADLINE_S
from warpwatch import cuda_steps, protocol
from warpwatch.borders import END, START
from warpwatch.cuda_steps import CudaSteps, device_uuid
from warpwatch.monitor import Monitor
from warpwatch.protocol import ABSENT
from warpwatch.ring import RingWriter, StepRow
from warpwatch.steps import StepClock


@pytest.fixture(autouse=True)
def passing(clock: ManualClock) -> ManualClock:
    """Time passes when it is read, and by hand."""
    return clock


def events_held(gpu: CudaSteps) -> int:
    """All events that are still known: free, in a step that waits, or the last step's end."""
    held = {id(event) for pool in gpu._pools.values() for event in pool}
    held |= {id(event) for event, _ in gpu._marks}
    for _, marks, _, previous_end in gpu._pending:
        held |= {id(event) for event, _ in marks} | {id(previous_end)}
    return len((held | {id(gpu._previous_end)}) - {id(None)})


class Finished(NamedTuple):
    """The words of a step."""

    number: int
    duration_ns: int
    gpu_ns: int
    allocated: int
    phases_ns: list[int]


class FinishedSteps(StepClock):
    """A clock that remembers what its steps came to."""

    __slots__ = ("finished",)

    def __init__(self) -> None:
        super().__init__()
        self.finished: list[Finished] = []

    def _write(self, steps: list[StepRow]) -> None:
        super()._write(steps)
        for _, _, words in steps:
            number, duration_ns, gpu_ns, allocated, _, _, *phases_ns = words
            self.finished.append(Finished(number, duration_ns, gpu_ns, allocated, phases_ns))


def simulated(pool_size: int = 512) -> tuple[SimulatedCuda, FinishedSteps, Monitor]:
    cuda = SimulatedCuda()
    clock = FinishedSteps()
    clock.cuda = cuda
    assert clock.use_gpu(cuda, pool_size)
    return cuda, clock, Monitor(clock)


def step(cuda: SimulatedCuda, monitor: Monitor, between_ms: float = 0.0) -> None:
    """One that is settled at its end, as long ones are."""
    cuda.launch(between_ms)
    with monitor.step():
        with monitor.phase("forward"):
            cuda.launch(30)
        with monitor.phase("backward"):
            cuda.launch(60)
        cuda.launch(10)
    monitor.clock.settle()


def test_steps_are_timed_between_their_end_events_on_the_stream() -> None:
    cuda, clock, monitor = simulated()
    for _ in range(3):
        step(cuda, monitor, between_ms=5)
        cuda.run()
    step(cuda, monitor)
    # The first has no step before it to be measured from: it is timed by the clock.
    second = clock.finished[1]
    assert (second.number, second.gpu_ns) == (1, 100_000_000)
    assert second.duration_ns == 105_000_000
    assert second.phases_ns[:2] == [30_000_000, 60_000_000]
    assert clock.finished[0].gpu_ns == ABSENT
    assert [found.number for found in clock.finished] == [0, 1, 2]


def test_nothing_waits_for_a_gpu_that_is_behind() -> None:
    cuda, clock, monitor = simulated()
    for _ in range(4):
        step(cuda, monitor)
    assert [found.number for found in clock.finished] == [0]
    cuda.run()
    step(cuda, monitor)
    assert [found.number for found in clock.finished] == [0, 1, 2, 3]
    assert [found.gpu_ns for found in clock.finished[1:]] == [100_000_000] * 3
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
    gpu = [found.gpu_ns for found in clock.finished]
    assert [found.number for found in clock.finished] == list(range(9))
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
    assert [found.gpu_ns == ABSENT for found in clock.finished] == [True, True, True, False]


def test_a_gpu_that_never_answers_costs_a_bounded_memory() -> None:
    cuda, clock, monitor = simulated(pool_size=2000)
    for _ in range(cuda_steps.MAX_PENDING + 50):
        step(cuda, monitor)
    assert len(clock.finished) == 50
    assert {found.gpu_ns for found in clock.finished} == {ABSENT}


def test_memory_is_read_once_a_second_at_most(passing: ManualClock) -> None:
    cuda, clock, monitor = simulated()
    for _ in range(21):
        step(cuda, monitor)
        cuda.run()
        passing.advance(0.1)
    assert cuda.memory_reads == 3
    read = {found.number: found.allocated for found in clock.finished if found.number in (0, 1, 10)}
    assert read == {0: 7 << 30, 1: ABSENT, 10: 7 << 30}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_exit_finishes_what_the_gpu_did_not_and_asks_it_in_the_training_thread_only(
    elsewhere: bool,
) -> None:
    cuda, clock, monitor = simulated()
    for _ in range(3):
        with monitor.step():
            cuda.launch(100)
    cuda.run(leave=1)
    cuda.queries = 0
    if elsewhere:
        thread = Thread(target=clock.finish)
        thread.start()
        thread.join(DEADLINE_S)
    else:
        clock.finish()
    gpu_ns = [ABSENT, ABSENT if elsewhere else 100_000_000, ABSENT]
    assert [(found.number, found.gpu_ns) for found in clock.finished] == list(enumerate(gpu_ns))
    assert cuda.queries == (0 if elsewhere else 2)


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
    cuda, clock, monitor = simulated()
    for _ in range(10):
        with monitor.step():
            cuda.launch(100)
    assert cuda.queries <= 1
    cuda.run()
    clock.settle()
    assert [found.number for found in clock.finished] == list(range(10))


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
    clock.settle()
    third = clock.finished[2]
    assert third.gpu_ns == 100_000_000
    assert (third.duration_ns, third.phases_ns[0]) == (100_000_000, 0)


def test_another_device_has_events_of_its_own() -> None:
    cuda, clock, monitor = simulated(pool_size=20)
    devices = (0, 0, 1, 1, 1, 0, 0)
    for device in devices:
        cuda.stream = SimulatedStream(device)
        step(cuda, monitor)
        cuda.run()
    step(cuda, monitor)
    gpu_ns = [found.gpu_ns for found in clock.finished]
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
    gpu_ns = [found.gpu_ns for found in clock.finished[:6]]
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


def read_memory(cuda: SimulatedCuda, monitor: Monitor, passing: ManualClock) -> None:
    """A step after a second."""
    passing.advance(1.0)
    step(cuda, monitor)
    cuda.run()


class WatchedLock:
    """Notes that something tried to take it."""

    def __init__(self) -> None:
        self.tries = 0
        self._lock = Lock()

    def acquire(self, blocking: bool) -> bool:
        self.tries += 1
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()


def test_a_helper_that_may_not_settle_keeps_no_one_else_from_it() -> None:
    _, clock, _ = simulated()
    lock = clock._settling = WatchedLock()  # type: ignore[assignment]
    clock.settle(helping=True)
    assert lock.tries == 0


def test_a_gpu_is_not_used_before_the_helper_has_settled_what_ran_without() -> None:
    clock = FinishedSteps()
    used: list[bool] = []

    class Log(list[Any]):
        def __getitem__(self, key: Any) -> Any:
            used.append(clock.use_gpu(SimulatedCuda()))
            return super().__getitem__(key)

    with Monitor(clock).step():
        pass
    clock.log = Log([START, 1, None, END, 2, (0, 0, 0)])
    clock.settle(helping=True)
    assert used == [False]
    assert clock.totals[0] == 2


def test_an_oom_that_the_program_catches_is_reported_once(
    ring: RingWriter, passing: ManualClock
) -> None:
    cuda, clock, monitor = simulated()
    clock.ring = ring
    for ooms in (0, 1, 1, 3):
        cuda.statistics = {**cuda.statistics, "num_ooms": ooms, "num_alloc_retries": 2 * ooms}
        read_memory(cuda, monitor, passing)
    reported = [json.loads(payload) for payload in records(ring, protocol.RECORD_EVENT)]
    assert [event["event"] for event in reported] == ["oom", "oom"]
    assert reported[1]["detail"] == "2 failed allocations on the device"
    memory = protocol.MEMORY.unpack(records(ring, protocol.RECORD_MEMORY)[-1])
    # This allocator knows nothing of what it reserved or of pieces.
    assert memory == (7 << 30, ABSENT, 8 << 30, 6, 3, ABSENT)


def test_an_allocator_without_statistics_costs_no_step_and_is_not_asked_again(
    ring: RingWriter, passing: ManualClock
) -> None:
    cuda, clock, monitor = simulated()
    clock.ring = ring
    cuda.statistics = {}
    for _ in range(4):
        read_memory(cuda, monitor, passing)
    assert cuda.memory_reads == 1
    assert [(found.number, found.gpu_ns, found.allocated) for found in clock.finished[1:]] == [
        (1, 100_000_000, ABSENT),
        (2, 100_000_000, ABSENT),
    ]
    assert records(ring, protocol.RECORD_MEMORY) == []
