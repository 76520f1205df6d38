"""Tests of the step clock without a daemon."""

import json
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest

from tests.client.daemon_side import Ring, written
from tests.client.interrupts import interrupted
from tests.client.simulated_cuda import SimulatedCuda
from tests.manual_clock import ManualClock
from tests.waiting import DEADLINE_S
from warpwatch import faults, protocol
from warpwatch.captures.control import Captures
from warpwatch.helper_thread import HelperThread, is_over
from warpwatch.hooks import hook_state
from warpwatch.hooks.hook_state import TURN_STEPS, ClockChoice
from warpwatch.monitor import Monitor
from warpwatch.protocol import WORD_STEP_BEGUN, WORD_STEP_BEGUN_AT
from warpwatch.ring import DURATION, FIRST_PHASE, SAMPLES, TOKENS, create
from warpwatch.step_times import BEGIN, END
from warpwatch.steps import StepClock


@pytest.fixture
def watched(clock: ManualClock) -> Monitor:
    return Monitor(StepClock())


def totals_ms(watched: Monitor) -> dict[str, int]:
    """Time in steps, by phase; ``other`` is what no phase has."""
    totals = watched.clock.totals
    phases = dict(zip(watched.clock.phase_names, totals[FIRST_PHASE:], strict=False))
    other = totals[DURATION] - sum(phases.values())
    spent = {"step": totals[DURATION], "other": other, **phases}
    return {name: round(ns / 1e6) for name, ns in spent.items()}


def counts(watched: Monitor) -> tuple[int, int, int]:
    totals = watched.clock.totals
    return watched.clock.steps, totals[SAMPLES], totals[TOKENS]


def take_step(watched: Monitor, times: int = 1) -> None:
    for _ in range(times):
        with watched.step():
            pass


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(DEADLINE_S)


def test_waiting_for_data_belongs_to_the_step_it_ends(watched, clock):
    def slow() -> Iterator[int]:
        for item in range(3):
            clock.advance(0.02)
            yield item

    seen = []
    for item in watched.wrap(slow()):
        with watched.step(samples=2, tokens=5):
            seen.append(item)
    assert seen == [0, 1, 2]
    # The first item came before the first step began.
    assert totals_ms(watched)["data_wait"] == 40
    assert counts(watched) == (3, 6, 15)

    class StartsWorkers:
        def __iter__(self) -> Iterator[int]:
            clock.advance(0.01)
            return iter(())

    with watched.step():
        assert list(watched.wrap(StartsWorkers())) == []
    assert totals_ms(watched)["data_wait"] == 50


def test_a_phase_ends_with_another_thread_inside(watched, clock):
    forward = watched.phase("forward")
    inside, leave = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with forward:
            inside.set()
            leave.wait(DEADLINE_S)

    thread = threading.Thread(target=elsewhere)
    with watched.step():
        with forward:
            thread.start()
            inside.wait(DEADLINE_S)
            clock.advance(0.01)
        clock.advance(0.05)
        leave.set()
        thread.join(DEADLINE_S)
    assert totals_ms(watched) == {"step": 60, "other": 50, "forward": 10}
    assert (watched.clock.current, forward._elsewhere) == (DURATION, [])


def test_another_thread_neither_counts_nor_disturbs_the_phases(watched):
    def elsewhere() -> None:
        with watched.step() as step, watched.phase("prefetch"):
            step.count(tokens=7)
        watched.switch("other")

    watched.lead("optimizer")
    with watched.clock as step:
        step.count(tokens=20)
        in_thread(elsewhere)
    assert (counts(watched), watched.clock.phase_names) == ((1, 0, 20), [])
    assert watched.step_clock == "optimizer"
    take_step(watched)
    assert (watched.step_clock, watched.clock.steps) == ("step()", 2)


def test_a_new_training_thread_takes_over_when_the_first_has_ended(watched, clock):
    def train() -> None:
        take_step(watched)
        trainers.append(watched.clock.trainer is threading.current_thread())

    trainers: list[bool] = []
    for _ in range(2):
        in_thread(train)
        # The next one may have its number.
        clock.advance(0.02)
    assert (watched.clock.steps, trainers) == (2, [True, True])


@pytest.mark.parametrize(("rested_s", "counted"), [(9.9, (1, 20)), (10.1, (6, 15))])
def test_a_thread_that_rests_for_10_s_and_16_calls_gives_way(watched, clock, rested_s, counted):
    take_step(watched)
    clock.advance(rested_s)
    in_thread(partial(take_step, watched, 20))
    assert (watched.clock.steps, watched.clock.steps_elsewhere) == counted


def test_a_thread_in_a_phase_for_longer_gives_no_way_on_a_gpu_either(watched, clock):
    watched.clock.use_gpu(SimulatedCuda())
    take_step(watched)
    with watched.phase("backward"):
        clock.advance(11)
        in_thread(partial(take_step, watched, 20))
    clock.advance(11)
    assert watched.clock.steps_elsewhere == 20
    in_thread(partial(take_step, watched, 20))
    assert watched.clock.steps == 1 + 5


def test_short_steps_are_settled_together_every_50_ms(watched, clock):
    take_step(watched)
    for passed_s, is_settled in ((0.0499, False), (0.0002, True)):
        clock.advance(passed_s)
        take_step(watched)
        assert (watched.clock.log == []) == is_settled
    take_step(watched)
    with watched.clock._settling:
        watched.clock.settle()
    assert watched.clock.log
    for passed_s, is_settled in ((0.0499, False), (0.0202, True)):
        clock.advance(passed_s)
        watched.clock.next_step(round(clock.monotonic() * 1e9))
        assert (watched.clock.log == []) == is_settled


def test_an_error_or_an_interrupt_costs_what_was_settled_then(watched):
    class Interrupts(int):
        def __sub__(self, other: int) -> int:
            raise KeyboardInterrupt

    watched.clock.log += [BEGIN, "no time", None]
    watched.clock.settle()
    watched.clock.log += [BEGIN, 1, None, BEGIN, Interrupts(), None, END, 2, (0, 0, 0, None)]
    with pytest.raises(KeyboardInterrupt):
        watched.clock.settle()
    watched.clock.settle()
    assert watched.clock.totals[0] == 1


def test_the_helper_wakes_up_as_often_as_it_is_needed(watched, clock, ring):
    waits: list[float] = []

    def wait(timeout: float) -> None:
        waits.append(timeout)
        raise Empty

    environ = {"WARPWATCH_ATTACH_INTERVAL_S": "0.25"}
    helper = HelperThread(watched, None, environ, clock.monotonic)
    watched.clock.wake_helper = SimpleNamespace(get=wait, put=waits.append)
    helper._sleep()
    take_step(watched)
    helper._sleep()
    helper._ring, helper._attached = ring, clock.monotonic()
    for passed_s, ring.command_fd in ((0.0, -1), (0.0, 7), (9.9, -1), (0.2, -1)):
        clock.advance(passed_s)
        helper._sleep()
    # No rank yet; woken by it; one that looks for a daemon; one without commands
    # yet; with them; without; later.
    assert waits == [5.0, None, 0.25, 0.1, 0.5, 0.1, 0.5]


def test_training_is_over_at_a_prompt_that_runs_no_code_and_not_in_a_thread(monkeypatch):
    def over() -> bool:
        return is_over(threading.current_thread(), threading.get_ident())

    def called_by(file: str, name: str) -> Any:
        found: dict[str, Any] = {}
        exec(compile(f"def {name}(function): return function()", file, "exec"), found)
        return found[name]

    prompt = called_by("/lib/python3.13/_pyrepl/main.py", "interactive_console")
    runs = called_by("/lib/python3.13/code.py", "runcode")
    assert [over(), prompt(over), prompt(partial(runs, over))] == [False, True, False]
    assert prompt(partial(called_by("/job/train.py", "runcode"), over))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    found = [over()]
    in_thread(lambda: found.append(over()))
    assert found == [True, False]
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert [over(), is_over(threading.Thread(), 0), is_over(threading.Thread(), 1)] == [
        *(False, False, True)
    ]


def test_a_folder_in_which_no_ring_can_be_made_is_closed(watched, folder):
    helper = HelperThread(watched, None, folder.environment())
    (folder.path / "ranks").rmdir()
    with pytest.raises(FileNotFoundError):
        helper._attach()
    opened = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    assert str(folder.path) not in opened


def test_a_wrapped_loader_keeps_no_batch_alive(watched):
    class Batch:
        pass

    alive = []
    for batch in watched.wrap(Batch() for _ in range(3)):
        alive.append(weakref.ref(batch))
        del batch
        assert alive[-1]() is None


def test_an_optimizer_at_the_address_of_a_deleted_one_is_new(watched, monkeypatch):
    class Optimizer:
        pass

    choice, first = ClockChoice(), Optimizer()
    monkeypatch.setattr(hook_state, "id", lambda optimizer: optimizer is first, raising=False)
    for _ in range(2):
        second = Optimizer()
        for is_new in (True, False):
            watched.clock.steps += TURN_STEPS
            assert choice.takes_over(second, first, watched.clock) == is_new


def test_an_interrupt_at_the_begin_of_a_step_costs_that_step_only(watched):
    def step() -> None:
        # A look for a command may begin a capture, for seconds.
        watched.clock._poll_ns = 0
        take_step(watched)

    lines = 0
    while interrupted(step, ("begin", "_begin"), lines):
        before = watched.clock.steps
        step()
        assert watched.clock.steps == before + 1, lines
        lines += 1
    assert lines > 5


class TimeLimit:
    def __call__(self, *_: Any) -> None:
        raise TimeoutError


@pytest.mark.parametrize("handler", [TimeLimit(), partial(TimeLimit()), TimeLimit().__call__])
def test_an_error_of_a_signal_handler_inside_our_code_reaches_the_program(
    watched, request, handler
):
    before = signal.signal(signal.SIGUSR1, handler)
    request.addfinalizer(partial(signal.signal, signal.SIGUSR1, before))
    watched.clock.push = lambda _: signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(TimeoutError):
        take_step(watched)


def test_an_interrupt_at_the_begin_of_a_phase_leaves_none_open(watched):
    def forward() -> None:
        with watched.phase("forward"):
            pass

    lines = 0
    with watched.step():
        while interrupted(forward, ("__enter__",), lines):
            lines += 1
        forward()
        watched.clock.settle()
        assert watched.clock.current == DURATION
    assert lines >= 3


def test_a_ring_that_comes_after_the_last_step_has_the_totals(watched, tmp_path, monkeypatch):
    for _ in range(3):
        with watched.step(samples=4), watched.phase("forward"):
            pass
    watched.clock.settle()
    folder = os.open(tmp_path, os.O_RDONLY)
    for name in ("late", "later"):
        watched.clock.ring = ring = create(folder, name, {})
        watched.clock.settle()
        totals = Ring(tmp_path / f"{name}.ring").header.totals
        assert (totals.steps, totals.samples) == (3, 12)
        watched.phase(name)
        assert written(ring)[0].payload == bytes(8) + b"forward"
        assert written(ring)[-1].payload.endswith(name.encode())
        ring.close()
    monkeypatch.setattr("warpwatch.ring.take_lock", lambda fd: False)
    with pytest.raises(OSError, match="locked by another process"):
        create(folder, "locked", {})
    assert sorted(os.listdir(folder)) == ["late.ring", "later.ring"]
    os.close(folder)


def test_who_finds_the_ring_taken_leaves_a_record_to_the_next_write(ring):
    with ring._lock:
        ring.event("first")
        assert written(ring) == []
    ring.event("second")
    assert [record.sequence for record in written(ring)] == [1, 2]


def test_a_writer_that_dies_in_a_slot_leaves_the_one_before(ring):
    ring.write_identity(protocol.Identity(1, bytes(16), 2, 3, 4, protocol.RECORD_COUNT))
    for number in (1, 2):
        ring.write_metadata({"number": number})
        ring.write_steps([], [number] * 22, 0)
    for torn, left in (((), 2), ((0,), 1), ((1,), 2)):
        data = bytearray(ring._view[: protocol.HEADER_SIZE])
        for slot in torn:
            data[protocol.META_OFFSETS[slot] + 20] ^= 1
            data[protocol.TOTALS_OFFSETS[slot] + 20] ^= 1
        header = protocol.decode_header(bytes(data), protocol.RING_SIZE)
        assert header.totals.steps == json.loads(header.metadata_text or b"")["number"] == left


def test_a_closed_file_is_no_error(watched, clock, ring):
    watched.clock.ring = ring
    ring.command_fd = os.open(os.devnull, os.O_RDONLY)
    os.close(ring.command_fd)
    watched.clock.captures = Captures()
    before = faults.count()
    watched.clock.begin()
    assert list(ring.words[WORD_STEP_BEGUN:])[:2] == [1, watched.clock.begun_ns]
    # Not before is it time for another look.
    for after_s, errors in ((0.019, 1), (0.001, 2)):
        clock.advance(after_s)
        watched.clock.next_step(round(clock.monotonic() * 1e9))
        assert faults.count() - before == errors
    watched.clock.report_begun(ring)
    now = round(clock.monotonic() * 1e9)
    assert ring.words[WORD_STEP_BEGUN] == 3 and ring.words[WORD_STEP_BEGUN_AT] + 9_000 > now
    ring.command_fd = -1


def test_a_forked_child_keeps_what_it_must_not_destroy():
    destroyed = []

    class Events:
        def __del__(self) -> None:
            destroyed.append(self)

    clock = StepClock()
    clock.use_gpu(Events())
    clock.drop()
    with clock:
        pass
    assert (clock.gpu, clock.steps, clock.push) == (None, 0, clock.log.extend)
    assert destroyed == []
