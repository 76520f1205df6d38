"""What the step clock counts, without a daemon."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.interrupts import interrupted
from warpwatch import faults, protocol
from warpwatch.captures.control import Captures
from warpwatch.monitor import Monitor
from warpwatch.ring import DURATION, FIRST_PHASE, SAMPLES, TOKENS, RingWriter
from warpwatch.steps import StepClock


def totals_ms(monitor: Monitor, name: str) -> float:
    index = FIRST_PHASE + monitor.clock.phase_names.index(name)
    return monitor.clock.totals[index] / 1e6


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    monitor = Monitor(StepClock())
    with monitor.step():
        time.sleep(0.02)
    time.sleep(0.03)
    with monitor.step():
        pass
    assert monitor.clock.steps == 2
    assert monitor.clock.totals[DURATION] / 1e6 >= 50


def test_nested_phases_are_disjoint_and_sum_to_the_step() -> None:
    monitor = Monitor(StepClock())
    with monitor.step(), monitor.phase("forward"):
        time.sleep(0.02)
        with monitor.phase("comm"):
            time.sleep(0.03)
        time.sleep(0.01)
    forward, comm = totals_ms(monitor, "forward"), totals_ms(monitor, "comm")
    assert forward >= 30
    assert comm >= 30
    # Were the inner time counted in the outer one too, the sum would be 30 ms over.
    assert abs(monitor.clock.totals[DURATION] / 1e6 - forward - comm) < 15


def test_waiting_for_data_between_steps_belongs_to_the_step_being_completed() -> None:
    def slow() -> Iterator[int]:
        for item in range(3):
            time.sleep(0.02)
            yield item

    monitor = Monitor(StepClock())
    seen = []
    for item in monitor.wrap(slow()):
        with monitor.step(samples=2, tokens=5):
            seen.append(item)
    assert seen == [0, 1, 2]
    # The first item came before the first step began.
    assert totals_ms(monitor, "data_wait") >= 40
    assert monitor.clock.totals[SAMPLES] == 6
    assert monitor.clock.totals[TOKENS] == 15


def test_a_wrapped_loader_keeps_its_length_truth_and_attributes() -> None:
    class Loader(list[int]):
        batch_size = 4

    monitor = Monitor(StepClock())
    wrapped = monitor.wrap(Loader([1, 2, 3]))
    assert len(wrapped) == 3
    assert wrapped.batch_size == 4
    assert list(wrapped) == list(wrapped) == [1, 2, 3]
    assert bool(monitor.wrap(iter([])))
    with pytest.raises(TypeError):
        len(monitor.wrap(iter([])))


def test_what_runs_between_phases_can_be_a_phase_itself() -> None:
    monitor = Monitor(StepClock())
    with monitor.step():
        monitor.switch("forward")
        time.sleep(0.02)
        with monitor.phase("backward"):
            # From its end on.
            monitor.switch("other")
            time.sleep(0.02)
        time.sleep(0.02)
    assert totals_ms(monitor, "forward") >= 20
    assert totals_ms(monitor, "backward") >= 20
    rest = totals_ms(monitor, "forward") + totals_ms(monitor, "backward")
    assert monitor.clock.totals[DURATION] / 1e6 - rest >= 20


def test_a_clock_that_starts_again_forgets_what_ran_since_the_last_step() -> None:
    monitor = Monitor(StepClock())
    with monitor.step():
        pass
    monitor.clock.begin()
    with monitor.phase("forward"):
        time.sleep(0.02)
    monitor.clock.restart()
    monitor.clock.end()
    assert monitor.clock.steps == 2
    assert totals_ms(monitor, "forward") == 0


@pytest.mark.parametrize(("source", "steps"), [("optimizer", 1), ("lightning", 1), ("step()", 0)])
def test_a_step_that_no_one_led_is_the_first_one_that_is_led(source: str, steps: int) -> None:
    monitor = Monitor(StepClock())
    monitor.clock.begin()
    assert monitor.lead(source)
    monitor.clock.end()
    assert (monitor.step_clock, monitor.clock.steps) == (source, steps)


def test_a_stronger_clock_drops_the_step_of_a_weaker_one_and_keeps_the_lead() -> None:
    monitor = Monitor(StepClock())
    assert monitor.lead("dataloader")
    monitor.clock.begin()
    assert monitor.lead("optimizer")
    assert not monitor.clock.open
    assert not monitor.lead("dataloader")
    assert monitor.lead("lightning")
    assert not monitor.lead("transformers")
    monitor.release("lightning")
    assert monitor.lead("dataloader")
    assert monitor.clock.steps == 0


def test_a_failed_step_is_not_counted_and_its_exception_passes() -> None:
    monitor = Monitor(StepClock())
    with pytest.raises(ZeroDivisionError), monitor.step(samples=8):
        1 / 0  # noqa: B018
    with monitor.step(samples=1):
        pass
    assert monitor.clock.steps == 1
    assert monitor.clock.totals[SAMPLES] == 1


def test_an_interrupt_at_the_begin_of_a_step_costs_that_step_only() -> None:
    monitor = Monitor(StepClock())

    def step() -> None:
        # A look for a command may begin a capture, for seconds.
        monitor.clock._look_ns = 0
        with monitor.step():
            pass

    lines = 0
    while interrupted(step, ("begin", "_begin"), lines):
        before = monitor.clock.steps
        step()
        assert monitor.clock.steps == before + 1, lines
        lines += 1
    assert lines > 5


def test_an_interrupt_at_the_begin_of_a_phase_leaves_none_open() -> None:
    monitor = Monitor(StepClock())

    def forward() -> None:
        with monitor.phase("forward"):
            pass

    lines = 0
    with monitor.step():
        while interrupted(forward, ("__enter__",), lines):
            lines += 1
        forward()
        monitor.clock.settle()
        assert monitor.clock.current == DURATION
    assert lines >= 3


def test_a_descriptor_that_the_program_closed_is_no_error_of_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "test.ring"
    path.write_bytes(bytes(protocol.RING_SIZE))
    clock = StepClock()
    clock.ring = RingWriter(os.open(path, os.O_RDWR), "test")
    clock.ring.command_fd = os.open(path, os.O_RDONLY)
    os.close(clock.ring.command_fd)
    clock.captures = Captures()
    before = faults.count()
    clock.begin()
    clock.next_step(time.monotonic_ns() + 20_000_000)
    clock.end()
    assert (clock.steps, faults.count() - before) == (2, 2)
    clock.ring.command_fd = -1
    clock.ring.close()


def test_a_step_inside_a_step_counts_once_with_the_outer_samples() -> None:
    monitor = Monitor(StepClock())
    with monitor.step(samples=8) as step:
        with monitor.step(samples=3):
            pass
        step.count(samples=2, tokens=7)
    assert monitor.clock.steps == 1
    assert monitor.clock.totals[SAMPLES] == 10
    assert monitor.clock.totals[TOKENS] == 7


def test_another_thread_neither_counts_nor_disturbs_the_phases() -> None:
    monitor = Monitor(StepClock())

    def elsewhere() -> None:
        with monitor.step(), monitor.phase("prefetch"):
            time.sleep(0.01)

    with monitor.step():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert monitor.clock.steps == 1
    assert monitor.clock.phase_names == []
    with monitor.step():
        pass
    assert monitor.clock.steps == 2


def test_a_phase_ends_while_another_thread_is_inside_of_it() -> None:
    monitor = Monitor(StepClock())
    forward = monitor.phase("forward")
    inside, leave = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with forward:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=elsewhere)
    with monitor.step():
        begun = time.monotonic()
        with forward:
            thread.start()
            inside.wait(10)
        spent_ms = (time.monotonic() - begun) * 1e3
        time.sleep(0.05)
        leave.set()
        thread.join()
    assert totals_ms(monitor, "forward") <= spent_ms
    assert monitor.clock.current == DURATION


def test_a_new_training_thread_takes_over_when_the_first_has_ended() -> None:
    monitor = Monitor(StepClock())

    def train() -> None:
        with monitor.step():
            pass

    for _ in range(2):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert monitor.clock.steps == 2


def test_counts_that_are_no_numbers_count_nothing() -> None:
    class Tensor:
        device = "cuda:0"

        def __index__(self) -> int:
            raise AssertionError("reading a tensor waits for the GPU")

        __int__ = __index__

    monitor = Monitor(StepClock())
    for samples in (Tensor(), -3, float("nan"), "many", None, 2.0):
        with monitor.step(samples=samples):  # type: ignore[arg-type]
            pass
    assert monitor.clock.steps == 6
    assert monitor.clock.totals[SAMPLES] == 2


def test_the_seventeenth_phase_is_other_time() -> None:
    monitor = Monitor(StepClock())
    with monitor.step():
        for number in range(17):
            with monitor.phase(f"part {number}"):
                pass
    assert len(monitor.clock.phase_names) == 16
    assert monitor.clock.phase_names[0] == "part_0"
    assert len(monitor.clock.totals) == 6 + 16


def test_a_wrapped_loader_keeps_no_batch_alive() -> None:
    class Batch:
        pass

    alive = []
    for batch in Monitor(StepClock()).wrap(Batch() for _ in range(3)):
        alive.append(weakref.ref(batch))
        del batch
        assert alive[-1]() is None


def test_a_wrapped_iterator_is_one_too() -> None:
    wrapped = Monitor(StepClock()).wrap(iter([1, 2]))
    assert (next(wrapped), next(wrapped), next(wrapped, None)) == (1, 2, None)


def test_a_forked_child_keeps_what_it_must_not_destroy() -> None:
    destroyed = []

    class Events:
        def __del__(self) -> None:
            destroyed.append(self)

    clock = StepClock()
    clock.use_gpu(Events())
    clock.drop()
    assert clock.gpu is None
    assert destroyed == []
