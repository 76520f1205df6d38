"""What a cause explained and what goes on without it; and what is no cause at all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.detection.life import Life
from tests.detection.streams import EPOCH_S
from warpwatch_detection.anomalies.causes import (
    DEVICE_CAUSES,
    EXPLAINED_BY,
    FOUND_ONCE,
    JOB_CAUSES,
)
from warpwatch_telemetry.anomalies import DEVICE_KINDS, EVENT_KINDS, Anomaly

ROWS = [
    (effect, cause)
    for table in (EXPLAINED_BY, DEVICE_CAUSES, JOB_CAUSES)
    for effect, causes in table.items()
    for cause in causes
    # Two events: what has happened and was reported with its cause is over with it.
    if not (effect in EVENT_KINDS and cause in EVENT_KINDS)
]
NOT_OVER_YET_S = 100.0


def about(kind: str) -> dict[str, Any]:
    return {"device": "GPU-3"} if kind in DEVICE_KINDS else {"rank": 3}


def end(life: Life, cause: str) -> None:
    if cause in EVENT_KINDS:
        life.register.expire(EPOCH_S + 600)
    else:
        life.fine(cause, NOT_OVER_YET_S, **({"device": "GPU-3"} if cause in DEVICE_KINDS else {}))


@pytest.mark.parametrize(("effect", "cause"), ROWS)
def test_an_effect_that_outlives_its_cause_becomes_active(effect, cause):
    life = Life()
    life.found(cause, 0, severity="critical", **about(cause))
    assert [one.kind for one in life.found(effect, 5, **about(effect))] in ([], [cause])
    end(life, cause)
    for again in range(0 if effect in FOUND_ONCE else 3):
        life.found(effect, 610 + again, **about(effect))
    assert [kind for kind, _ in life.active] == [effect]


def test_a_hang_that_outlives_its_cause_is_found_with_what_was_known():
    life = Life()
    life.found("device_lost", 0, severity="critical", device="GPU-3")
    life.found("hang", 5, "no step", rank=3, severity="critical", step=70, value=140.0)
    life.fine("device_lost", 60, device="GPU-3")
    (hang,) = life.register.active
    assert (hang.time, hang.kind, hang.severity, hang.rank, hang.device) == (
        EPOCH_S + 60, "hang", "critical", 3, "GPU-3",
    )  # fmt: skip
    assert (hang.summary, hang.step, hang.value) == ("no step", 70, 140.0)
    assert life.register.state.suppressed == {}


def test_a_hang_that_was_found_before_its_cause_goes_on_as_the_same_one():
    life = Life()
    (first,) = life.found("hang", 0, severity="critical", step=70)
    life.found("device_lost", 5, severity="critical", device="GPU-3")
    life.fine("device_lost", 60, device="GPU-3")
    (hang,) = life.register.active
    assert (hang.id, hang.step, hang.reopened) == (first.id, 70, 1)


def test_a_hang_that_ended_before_its_cause_is_not_found():
    life = Life()
    life.found("device_lost", 0, severity="critical", device="GPU-3")
    life.found("hang", 5)
    life.fine("hang", 30)
    life.fine("device_lost", 60, device="GPU-3")
    assert life.active == []


@pytest.mark.parametrize(("ends", "active"), [(590, [("crash", 3)]), (700, [])])
def test_a_crash_outlives_its_cause_as_long_as_events_are_held(ends, active):
    life = Life(hold_s=600)
    life.found("device_lost", 0, severity="critical", device="GPU-3")
    life.found("crash", 5, rank=3)
    life.fine("device_lost", ends, device="GPU-3")
    assert life.active == active


def test_a_crash_that_an_xid_explained_is_over_with_it():
    life = Life()
    life.found("xid", 0, device="GPU-3", severity="critical", value=79.0)
    life.found("crash", 5, rank=3, severity="critical")
    life.register.expire(EPOCH_S + 600)
    assert life.active == []
    assert life.register.state.suppressed == {}


@pytest.mark.parametrize(
    ("cause", "effect", "explained"),
    [
        (("thermal_throttle", "warning", None), ("straggler", "warning"), True),
        (("xid", "critical", 79.0), ("crash", "critical"), True),
        (("xid", "critical", 79.0), ("hang", "critical"), True),
        (("nvlink_error", "critical", None), ("hang", "critical"), True),
        (("nvlink_error", "warning", None), ("hang", "critical"), False),
        (("xid", "warning", 31.0), ("crash", "critical"), False),
        (("xid", "warning", 13.0), ("hang", "critical"), False),
        (("xid", "warning", 31.0), ("crash", "info"), False),
    ],
)
@pytest.mark.parametrize("effect_first", [False, True])
def test_what_stops_a_job_is_explained_by_nothing_less(cause, effect, explained, effect_first):
    life = Life()

    def tell_effect() -> list[Anomaly]:
        return life.found(effect[0], 5, rank=3, severity=effect[1])

    if effect_first:
        tell_effect()
    life.found(cause[0], 5, device="GPU-3", severity=cause[1], value=cause[2])
    if not effect_first:
        tell_effect()
    assert {kind for kind, _ in life.active} == {cause[0]} | (
        {effect[0]} if not explained else set()
    )
