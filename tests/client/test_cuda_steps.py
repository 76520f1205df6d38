"""Steps timed by events, on a simulated stream: in order, in its own time, behind the CPU."""

import json
from threading import Thread
from typing import Any, NamedTuple

import pytest

from tests.client.daemon_side import written
from tests.client.simulated_cuda import SimulatedCuda, SimulatedStream
from tests.manual_clock import ManualClock
from tests.waiting import DEADLINE_S
from warpwatch import faults, protocol
from warpwatch.monitor import Monitor
from warpwatch.protocol import ABSENT
from warpwatch.ring import RingWriter, StepRow
from warpwatch.step_times import END, START, CudaSteps
from warpwatch.steps import StepClock


@pytest.fixture(autouse=True)
def passing(clock: ManualClock) -> ManualClock:
    """Time passes when it is read, and by hand."""
    return clock


class Finished(NamedTuple):
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
        for _, _, words, _ in steps:
            number, duration_ns, gpu_ns, allocated, _, _, *phases_ns = words
            self.finished.append(Finished(number, duration_ns, gpu_ns, allocated, phases_ns))


class Training:
    """Steps of 100 ms on a simulated GPU, 30 of them forward and 60 backward."""

    def __init__(self, pool_size: int = 512) -> None:
        self.cuda = SimulatedCuda()
        self.clock = FinishedSteps()
        self.clock.cuda = self.cuda
        assert self.clock.use_gpu(self.cuda, pool_size)
        self.monitor = Monitor(self.clock)

    def step(self, count: int = 1, run: bool = True, between_ms: float = 0.0) -> None:
        """Steps that are settled at their ends, as long ones are. ``run``: so is the GPU's work."""
        for _ in range(count):
            self.cuda.launch(between_ms)
            with self.monitor.step():
                with self.monitor.phase("forward"):
                    self.cuda.launch(30)
                with self.monitor.phase("backward"):
                    self.cuda.launch(60)
                self.cuda.launch(10)
            self.clock.settle()
            if run:
                self.cuda.run()

    @property
    def numbers(self) -> list[int]:
        return [found.number for found in self.clock.finished]

    @property
    def gpu_ms(self) -> list[int | None]:
        found = [step.gpu_ns for step in self.clock.finished]
        return [None if ns == ABSENT else round(ns / 1e6) for ns in found]

    @property
    def events_held(self) -> int:
        """All events that are still known: free, in a step that waits, or the last step's end."""
        gpu = self.clock.gpu
        assert isinstance(gpu, CudaSteps)
        free = [id(event) for pool in gpu._pools.values() for event in pool]
        held = set(free)
        assert len(free) == len(held)
        held |= {id(event) for event, _ in gpu._marks}
        for _, marks, _, previous_end in gpu._pending:
            held |= {id(event) for event, _ in marks} | {id(previous_end)}
        return len((held | {id(gpu._previous_end)}) - {id(None)})


def test_steps_are_timed_between_their_end_events_on_the_stream() -> None:
    training = Training()
    training.step(4, between_ms=5)
    # The first has no step before it to be measured from: it is timed by the clock.
    assert (training.numbers, training.gpu_ms) == ([0, 1, 2], [None, 100, 100])
    second = training.clock.finished[1]
    assert second.duration_ns == 105_000_000
    assert second.phases_ns[:2] == [30_000_000, 60_000_000]
    # Events before a new start belong to no step.
    training.cuda.launch(500)
    training.clock.restart()
    training.clock.open = False
    training.step(3)
    assert training.gpu_ms == [None, 100, 100, 100, None, 100]
    assert training.clock.finished[5].duration_ns == 100_000_000


def test_steps_without_a_gap_are_timed_from_end_to_end(passing: ManualClock) -> None:
    training = Training()
    training.clock.begin()
    for _ in range(4):
        training.cuda.launch(100)
        passing.advance(0.1)
        training.clock.next_step(round(passing.monotonic() * 1e9))
        training.clock.settle()
        training.cuda.run()
    assert training.gpu_ms == [None, 100, 100]
    # Two that end at the very same time have one event for both.
    for _ in range(2):
        training.clock.next_step(round(passing.monotonic() * 1e9))
    training.cuda.run()
    training.clock.next_step(round(passing.monotonic() * 1e9) + 1)
    training.clock.settle()
    assert (training.numbers, training.events_held) == ([*range(6)], 512)


def test_nothing_waits_for_a_gpu_that_is_behind() -> None:
    training = Training()
    training.step(4, run=False)
    assert training.numbers == [0]
    training.cuda.run()
    training.step(run=False)
    assert (training.numbers, training.gpu_ms) == ([0, 1, 2, 3], [None, 100, 100, 100])
    assert (training.clock.steps, training.clock.totals[0]) == (5, 4)


def test_an_exhausted_pool_falls_back_to_the_clock_and_recovers() -> None:
    training = Training(pool_size=20)
    training.step(6, run=False)
    training.cuda.run()
    training.step(4)
    assert training.numbers == list(range(9))
    assert training.gpu_ms[0] is None and None in training.gpu_ms[2:6]
    assert training.gpu_ms[-1] == 100
    assert training.events_held == 20


def test_no_event_leaks_over_many_steps_of_every_sort() -> None:
    training = Training(pool_size=40)
    for number in range(300):
        if number % 10 == 0:
            training.monitor.switch("eval")
            training.monitor.switch("other")
            training.clock.restart()
            training.clock.open = False
        training.cuda.graph_capture = number % 7 == 3
        training.step(run=False)
        training.cuda.graph_capture = False
        training.cuda.run(leave=number % 5)
    assert training.events_held == 40
    assert training.clock.totals[0] >= 290


def test_a_graph_capture_is_left_alone() -> None:
    training = Training()
    training.step(2)
    training.cuda.graph_capture, before = True, faults.count()
    training.step(run=False)
    training.cuda.graph_capture = False
    training.step(3)
    assert training.gpu_ms == [None, 100, None, None, 100]
    with training.monitor.step():
        training.cuda.graph_capture = True
        with training.monitor.phase("forward"):
            training.cuda.graph_capture = False
        training.cuda.launch(100)
    training.step(2)
    assert training.gpu_ms[5:] == [100, None, 100]
    assert faults.count() == before


def test_a_gpu_that_never_answers_costs_a_bounded_memory() -> None:
    training = Training(pool_size=2000)
    training.step(306, run=False)
    assert training.gpu_ms == [None] * 50


def test_a_long_evaluation_costs_a_bounded_memory() -> None:
    training = Training()
    training.step(2)
    for _ in range(10_000):
        training.monitor.switch("eval")
    length = len(training.clock.log)
    assert length < 3 * 5_000
    training.clock.log *= 4
    thread = Thread(target=training.clock._shorten)
    thread.start()
    thread.join(DEADLINE_S)
    assert len(training.clock.log) == 4 * length
    del training.clock.log[length:]
    training.step(4)
    assert (training.gpu_ms, training.events_held) == ([None, 100, None, None, 100], 512)


def test_memory_is_read_once_a_second_at_most(passing: ManualClock) -> None:
    training = Training()
    for _ in range(21):
        training.step()
        passing.advance(0.1)
    assert training.cuda.memory_reads == 3
    allocated = [step.allocated for step in training.clock.finished]
    assert [number for number, bytes_ in enumerate(allocated) if bytes_ == 7 << 30] == [0, 10]
    assert set(allocated) == {7 << 30, ABSENT}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_exit_asks_the_gpu_in_the_training_thread_only(elsewhere: bool) -> None:
    training = Training()
    cuda, clock = training.cuda, training.clock
    for _ in range(3):
        with training.monitor.step():
            cuda.launch(100)
    cuda.run(leave=1)
    cuda.queries = 0
    if elsewhere:
        thread = Thread(target=clock.finish)
        thread.start()
        thread.join(DEADLINE_S)
    else:
        clock.finish()
    assert training.numbers == [0, 1, 2]
    assert training.gpu_ms == [None, None if elsewhere else 100, None]
    assert cuda.queries == (0 if elsewhere else 2)


@pytest.mark.parametrize("broken", ["is_current_stream_capturing", "current_stream"])
def test_steps_that_cannot_be_timed_on_the_gpu_are_timed_by_the_clock(broken: str) -> None:
    training, before = Training(), faults.count()
    training.step(2)
    setattr(training.cuda, broken, lambda: 1 // 0)
    training.step(2)
    delattr(training.cuda, broken)
    training.step(3)
    assert training.numbers == list(range(6)) and faults.count() > before
    assert (training.gpu_ms[1], training.gpu_ms[-1]) == (100, 100)


def test_a_gpu_that_is_behind_is_not_asked_at_every_step() -> None:
    training = Training()
    for _ in range(10):
        with training.monitor.step():
            training.cuda.launch(100)
    assert training.cuda.queries <= 1
    training.cuda.run()
    training.clock.settle()
    assert training.numbers == list(range(10))


def test_a_side_stream_inside_a_step_does_not_mix_up_its_times() -> None:
    training = Training()
    cuda = training.cuda
    for _ in range(3):
        with training.monitor.step():
            cuda.launch(30)
            cuda.stream = SimulatedStream(0, compute=False)
            with training.monitor.phase("comm"):
                pass
            cuda.stream = SimulatedStream(0)
            cuda.launch(70)
        cuda.run()
    training.clock.settle()
    third = training.clock.finished[2]
    assert (third.gpu_ns, third.duration_ns, third.phases_ns[0]) == (100_000_000, 100_000_000, 0)
    # Events of a step on a stream that is ahead: no time is negative.
    cuda.stream = SimulatedStream(0, compute=False)
    training.step(2)
    assert [step.duration_ns for step in training.clock.finished[3:]] == [0, 0]


# The first step on a device has no step before it there.
@pytest.mark.parametrize(
    ("devices", "run", "gpu_ms"),
    [
        ((0, 0, 1, 1, 1, 0, 0), True, [None, 100, None, 100, 100, None, 100]),
        # It changes while steps wait.
        ((0, 0, 1, 0, 1, 1), False, [None, 100, None, None, None, 100]),
    ],
)
def test_a_device_has_events(devices: tuple[int, ...], run: bool, gpu_ms: list[int | None]) -> None:
    training, before = Training(pool_size=20), faults.count()
    for device in devices:
        training.cuda.stream = SimulatedStream(device)
        training.step(run=run)
    training.cuda.run()
    training.step(3)
    assert training.gpu_ms[: len(devices)] == gpu_ms
    assert (training.events_held, training.cuda.made, faults.count()) == (40, 40, before)


def records(ring: RingWriter, kind: int) -> list[bytes]:
    return [record.payload for record in written(ring) if record.type == kind]


def test_a_helper_that_may_not_settle_keeps_no_one_else_from_it() -> None:
    class WatchedLock:
        def __init__(self) -> None:
            self.tries: list[Any] = []

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            self.tries.append(blocking and timeout)
            return False

    clock = Training().clock
    lock: Any = WatchedLock()
    clock._settling = lock
    clock.settle(helping=True)
    assert lock.tries == []
    # Only the end waits, and not for ever.
    clock.settle()
    clock.finish()
    assert lock.tries == [False, 0.2]


def test_a_gpu_is_not_used_before_the_helper_has_settled_what_ran_without() -> None:
    clock = FinishedSteps()
    used: list[bool] = []

    class Log(list[Any]):
        def __getitem__(self, key: Any) -> Any:
            used.append(clock.use_gpu(SimulatedCuda()))
            return super().__getitem__(key)

    with Monitor(clock).step():
        pass
    clock.log = Log([START, 1, None, END, 2, (0, 0, 0, None)])
    clock.settle(helping=True)
    assert used == [False]
    assert clock.totals[0] == 2
    clock.log = [END, 3, (0, 0, 0, None)]
    assert clock.use_gpu(SimulatedCuda())
    assert clock.totals[0] == 3


def test_a_caught_oom_is_reported_once(ring: RingWriter, passing: ManualClock) -> None:
    training = Training()
    training.clock.ring = ring
    cuda = training.cuda
    for ooms in (0, 1, 1, 3):
        cuda.statistics = {**cuda.statistics, "num_ooms": ooms, "num_alloc_retries": 2 * ooms}
        passing.advance(1.0)
        training.step()
    reported = [json.loads(payload) for payload in records(ring, protocol.RECORD_EVENT)]
    assert [event["event"] for event in reported] == ["oom", "oom"]
    assert reported[1]["detail"] == "2 failed allocations on the device"
    memory = protocol.MEMORY.unpack(records(ring, protocol.RECORD_MEMORY)[-1])
    # This allocator knows nothing of what it reserved or of pieces.
    assert memory == (7 << 30, ABSENT, 8 << 30, 6, 3, ABSENT)


def test_a_poor_allocator_is_asked_once(ring: RingWriter, passing: ManualClock) -> None:
    training = Training()
    training.clock.ring = ring
    training.cuda.statistics = {}
    for _ in range(4):
        passing.advance(1.0)
        training.step()
    assert training.cuda.memory_reads == 1
    assert (training.numbers, training.gpu_ms) == ([0, 1, 2], [None, 100, 100])
    assert {step.allocated for step in training.clock.finished} == {ABSENT}
    assert records(ring, protocol.RECORD_MEMORY) == []
