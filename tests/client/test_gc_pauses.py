"""Pauses of the garbage collector: counted, reported, and gone when no one wants them."""

import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases import cases
from tests.client.daemon_side import Folder, written
from tests.client.training import training
from tests.waiting import eventually
from warpwatch import protocol
from warpwatch.gc_pauses import GcPauses
from warpwatch.ring import RingWriter
from warpwatch.steps import StepClock

PROGRAM = cases(__file__)


@pytest.fixture
def pauses() -> Iterator[GcPauses]:
    gc.disable()
    found = GcPauses(StepClock(), {})
    yield found
    found.drop()
    gc.enable()


def collect(pauses: GcPauses, pause_ns: int, generation: int = 2) -> None:
    now = [1_000]
    pauses._monotonic_ns = lambda: now[0]
    pauses._collected("start", {"generation": generation})
    now[0] += pause_ns
    pauses._collected("stop", {"generation": generation})


def test_a_long_pause_is_an_event_with_its_step(pauses: GcPauses, ring: RingWriter) -> None:
    pauses._clock.steps = 42
    # One whose start was not seen, and one of a capture.
    pauses._collected("stop", {"generation": 2})
    pauses._clock.flags = 1
    collect(pauses, 90_000_000)
    pauses._clock.flags = 0
    collect(pauses, 10_000_000, generation=2)
    collect(pauses, 2_000_000, generation=0)
    pauses._collected("stop", {"generation": 2})
    pauses.report(ring, now_s=1)
    record, event = written(ring)
    assert protocol.GC.unpack(record.payload) == (12_000_000, 2, 10_000_000)
    pause = {"event": "gc_pause", "duration_s": 0.01, "generation": 2, "step": 41}
    assert json.loads(event.payload) == pause


def test_it_reports_once_a_second_and_only_what_changed(pauses: GcPauses, ring: RingWriter) -> None:
    collect(pauses, 9_999_999)
    pauses.report(ring, now_s=1)
    collect(pauses, 3_000_000)
    pauses.report(ring, now_s=1.9)
    collect(pauses, 4_000_000)
    pauses.report(ring, now_s=2)
    pauses.report(ring, now_s=3.5)
    found = [protocol.GC.unpack(record.payload) for record in written(ring)]
    assert found == [(9_999_999, 1, 9_999_999), (16_999_999, 3, 4_000_000)]


def test_it_comes_back_after_callbacks_were_cleared(pauses: GcPauses, ring: RingWriter) -> None:
    pauses.report(ring, now_s=1)
    pauses.report(ring, now_s=1)
    assert gc.callbacks.count(pauses._collected) == 1
    others = gc.callbacks[:]
    gc.callbacks.clear()
    pauses.report(ring, now_s=1)
    assert gc.callbacks == [pauses._collected]
    gc.callbacks[:] = others


def test_it_can_be_switched_off(ring: RingWriter) -> None:
    pauses = GcPauses(StepClock(), {"WARPWATCH_GC": "0"})
    dropped = GcPauses(StepClock(), {})
    dropped.drop()
    for found in (pauses, dropped):
        found.report(ring, now_s=1)
        assert found._collected not in gc.callbacks
    pauses.drop()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_reports_pauses_from_its_first_step_on_a_child_none(folder: Folder) -> None:
    with training(folder, define=PROGRAM["ours"], main="before = ours()\nserve()") as found:
        found.steps(1, PROGRAM["collect"])

        def totals() -> tuple[Any, ...] | None:
            found = [record for record in folder.ring().records if record.type == 5]
            return protocol.GC.unpack(found[-1].payload) if found else None

        total_ns, collections, longest_ns = eventually(totals)
        assert collections >= 1
        assert 0 < longest_ns <= total_ns
        found.end()
