"""An anomaly's life: opened once, updated, explained, closed when it is over, and continued."""

from typing import Any

import pytest

from tests.cases import cases
from tests.detection.life import LLAMA, Life
from tests.detection.streams import EPOCH_S
from warpwatch_detection.anomalies import register as register_module
from warpwatch_detection.anomalies.explanation import DEVICE_CAUSES, EXPLAINED_BY, JOB_CAUSES
from warpwatch_detection.anomalies.register import FOUND_ONCE
from warpwatch_telemetry.anomalies import DEVICE_KINDS, EVENT_KINDS
from warpwatch_telemetry.jobs import JobId

SLOW = "0 straggler 3; 5 step_regression; "
STORIES = cases(__file__)


@pytest.mark.parametrize("name", STORIES)
def test_what_is_active_is_what_lasts(name):
    story, life = STORIES[name], Life()
    life.tell(story["story"])
    said = [kind if rank is None else f"{kind} {rank}" for kind, rank in life.active]
    assert ", ".join(said) == story["active"]
    assert len({anomaly.id for anomaly in life.changes}) == story["count"]
    assert all(one.end_time is None or one.end_time >= one.time for one in life.changes)
    if not said:
        assert life.register.state.suppressed == {}


@pytest.mark.parametrize(
    ("begin_step", "values", "raised_after"),
    [(499, (0.3, 0.2, 0.1, 0.05), None), (499, (0.3, 0.2, 0.3, 0.4), 4), (501, (0.3,), 1)],
)
def test_spikes_that_began_before_a_cause_was_over_are_its_effect_unless_they_go_on(
    begin_step, values, raised_after
):
    life = Life()
    life.rank_devices.jobs[LLAMA][3].step = 500
    life.tell("0 straggler 3; 60 fine straggler")
    looks = [
        life.found("step_spikes", 80 + 40 * look, begin_step=begin_step, value=value)
        for look, value in enumerate(values)
    ]
    raised = [look for look, changes in enumerate(looks, 1) if changes]
    assert raised == ([] if raised_after is None else [raised_after])
    life.fine("step_spikes", 300)
    assert life.register.state.suppressed == {}


def test_without_a_grace_nothing_is_continued():
    life = Life(reopen_s=0)
    life.tell("0 hang; 1 fine hang; 2 hang")
    assert len({anomaly.id for anomaly in life.changes}) == 2


def test_what_is_continued_keeps_when_and_where_it_began():
    life = Life()
    (first,) = life.found("gc_pause", 0, rank=3, begin_step=70)
    (ended,) = life.fine("gc_pause", 60)
    (again,) = life.found("gc_pause", 180, rank=3, begin_step=400)
    assert ended.end_time == EPOCH_S + 60
    assert (again.id, again.time, again.begin_step) == (first.id, first.time, 70)
    assert (again.end_time, again.reopened) == (None, 1)
    assert list(life.register.history) == []


def test_of_two_culprits_the_first_ends_where_the_other_begins():
    life = Life()
    life.tell("0 straggler 2; 10 straggler")
    ended, new = life.found("straggler", 20, rank=5)
    assert (ended.rank, ended.end_time) == (2, EPOCH_S + 20)
    assert (new.rank, new.end_time) == (5, None)
    (first, *_) = life.changes
    life.tell("40 straggler 2; 60 straggler 5; 80 straggler 2")
    (now,) = life.register.active
    assert (now.id, now.rank, now.reopened) == (first.id, None, 1)
    assert [one.explained_by for one in life.register.history] == [first.id]


def test_severity_goes_up_and_never_down_again():
    life = Life()
    for at, severity in enumerate(("info", "critical", "warning")):
        life.found("memory_pressure", at, rank=0, severity=severity)
    assert [one.severity for one in life.changes] == ["info", "critical", "critical"]


def test_what_is_explained_is_known_with_its_cause():
    life = Life()
    (cause,) = life.found("straggler", 0, rank=3)
    life.tell("5 step_regression; 15 step_regression")
    (suppressed,) = life.register.state.suppressed.values()
    assert (suppressed.kind, suppressed.cause, suppressed.cause_id) == (
        "step_regression", "straggler", cause.id,
    )  # fmt: skip
    assert (suppressed.since, suppressed.found.time) == (EPOCH_S + 5, EPOCH_S + 15)
    assert life.register.suppressed_counts == {("step_regression", "straggler"): 1}
    life.tell("300 fine straggler; 310 step_regression; 320 step_regression")
    assert life.active == []


def test_a_cause_that_comes_later_is_named_by_what_it_ends():
    life = Life()
    (effect,) = life.found("step_regression", 0)
    cause, ended = life.found("straggler", 5, rank=3)
    assert (cause.kind, ended.id, ended.end_time) == ("straggler", effect.id, EPOCH_S + 5)
    assert ended.explained_by == cause.id


def test_another_jobs_anomaly_explains_nothing():
    life = Life()
    life.found("straggler", 0, rank=3, job="bert")
    life.found("step_regression", 5)
    assert life.active == [("straggler", 3), ("step_regression", None)]


def test_a_hang_that_outlives_its_cause_is_found_with_what_was_known():
    life = Life()
    life.found("device_lost", 0, severity="critical", device="GPU-3")
    life.found("hang", 5, "no step", rank=3, severity="critical", step=70, value=140.0)
    life.fine("device_lost", 60, device="GPU-3")
    (hang,) = life.register.active
    assert (hang.time, hang.kind, hang.severity) == (EPOCH_S + 60, "hang", "critical")
    assert (hang.rank, hang.device, hang.step) == (3, "GPU-3", 70)
    assert (hang.summary, hang.value) == ("no step", 140.0)


# Two events: what has happened and was reported with its cause is over with it.
EXPLAINED = [
    (effect, cause)
    for table in (EXPLAINED_BY, DEVICE_CAUSES, JOB_CAUSES)
    for effect, causes in table.items()
    for cause in causes
    if not (effect in EVENT_KINDS and cause in EVENT_KINDS)
]


def about(kind: str) -> dict[str, Any]:
    return {"device": "GPU-3"} if kind in DEVICE_KINDS else {"rank": 3}


def test_every_effect_that_outlives_its_cause_becomes_active():
    for effect, cause in EXPLAINED:
        life = Life()
        life.found(cause, 0, severity="critical", **about(cause))
        assert [one.kind for one in life.found(effect, 5, **about(effect))] in ([], [cause])
        if cause in EVENT_KINDS:
            life.register.expire(EPOCH_S + 600)
        else:
            life.fine(cause, 100, **({"device": "GPU-3"} if cause in DEVICE_KINDS else {}))
        for again in range(0 if effect in FOUND_ONCE else 3):
            life.found(effect, 610 + again, **about(effect))
        assert [kind for kind, _ in life.active] == [effect], (effect, cause)


@pytest.mark.parametrize(
    ("cause", "effect", "explained"),
    [
        ("thermal_throttle GPU-3 warning", "straggler 3 warning", True),
        ("xid GPU-3 critical 79", "crash 3 critical", True),
        ("xid GPU-3 critical 79", "hang 3 critical", True),
        ("nvlink_error GPU-3 critical", "hang 3 critical", True),
        ("nvlink_error GPU-3 warning", "hang 3 critical", False),
        ("xid GPU-3 warning 31", "crash 3 critical", False),
        ("xid GPU-3 warning 13", "hang 3 critical", False),
        ("xid GPU-3 warning 31", "crash 3 info", False),
    ],
)
def test_what_stops_a_job_is_explained_by_nothing_less(cause, effect, explained):
    for order in (f"5 {effect}; 5 {cause}", f"5 {cause}; 5 {effect}"):
        life = Life()
        life.tell(order)
        kinds = {cause.split()[0]} | ({effect.split()[0]} if not explained else set())
        assert {kind for kind, _ in life.active} == kinds


# --- devices ---


def test_a_devices_anomaly_gets_its_job_and_rank():
    life = Life()
    (throttled,) = life.found("thermal_throttle", 0, device="GPU-3")
    assert (throttled.job, throttled.rank, throttled.device) == ("llama", 3, "GPU-3")
    (unused,) = life.found("thermal_throttle", 0, device="GPU-9")
    assert (unused.job, unused.rank) == (None, None)
    life.rank_devices.jobs[LLAMA][5].device = "GPU-4"
    (shared,) = life.found("thermal_throttle", 0, device="GPU-4")
    assert (shared.job, shared.rank) == ("llama", None)


@pytest.mark.parametrize("effect_first", [False, True])
def test_a_throttled_gpu_and_its_slow_rank_are_one_anomaly(effect_first):
    life = Life()
    order: list[tuple[str, str, dict[str, Any]]] = [
        ("thermal_throttle", "GPU 3 is throttled by heat", {"device": "GPU-3"}),
        ("straggler", "rank 3 computes 24 % longer", {"rank": 3, "severity": "critical"}),
    ]
    for kind, said, more in reversed(order) if effect_first else order:
        life.found(kind, 0, said, **more)
    (one,) = life.register.active
    assert (one.kind, one.job, one.rank, one.severity) == (
        "thermal_throttle", "llama", 3, "critical",
    )  # fmt: skip
    assert one.effects == ("in llama rank 3 computes 24 % longer",)
    assert one.summary == "GPU 3 is throttled by heat; in llama rank 3 computes 24 % longer"
    ended = list(life.register.history)
    assert [anomaly.explained_by for anomaly in ended] == [one.id] * effect_first
    # Its newest numbers, with those of the device.
    life.found("straggler", 15, "31 % longer", rank=3)
    life.found("thermal_throttle", 20, "GPU 3 is very hot", device="GPU-3")
    assert life.register.active[0].summary == "GPU 3 is very hot; in llama 31 % longer"


def test_a_slow_job_is_explained_by_its_devices_if_half_of_them_are_slow():
    life = Life()
    life.tell("0 power_brake GPU-0; 1 power_brake GPU-1; 2 power_brake GPU-2")
    assert len(life.found("step_regression", 5)) == 1
    changes = life.found("power_brake", 6, device="GPU-3")
    assert ("step_regression", EPOCH_S + 6) in [(one.kind, one.end_time) for one in changes]
    assert [kind for kind, _ in life.active] == ["power_brake"] * 4


# --- bounds ---


def test_the_end_of_a_job_leaves_nothing_of_its_states():
    life = Life()
    life.tell(SLOW + "6 crash 3")
    (closed,) = life.register.end_job(LLAMA, EPOCH_S + 9)
    assert (closed.anomaly.kind, closed.anomaly.end_time) == ("straggler", EPOCH_S + 9)
    assert life.active == [("crash", 3)]
    assert (life.register.state.suppressed, life.register.state.ended) == ({}, {})


def test_more_anomalies_than_the_bound_are_refused_but_a_devices(monkeypatch):
    monkeypatch.setattr(register_module, "MAX_ACTIVE", 3)
    life = Life()
    for number in range(5):
        life.found("hang", number, job=f"job-{number}")
    assert (len(life.active), life.register.refused) == (3, 2)
    life.fine("hang", 10, job_id=JobId("", "job-0", ""))
    life.found("hang", 11, job="job-4")
    assert len(life.active) == 3
    (lost,) = life.found("device_lost", 12, severity="critical", device="GPU-99")
    assert (lost.kind, life.register.refused) == ("device_lost", 2)


def test_an_owner_with_many_anomalies_leaves_room_for_those_of_others(monkeypatch):
    monkeypatch.setattr(register_module, "MAX_ACTIVE_OF_OWNER", 3)
    life = Life()
    for number in range(5):
        life.found("hang", number, job=f"job-{number}", owner="uid/7")
    life.found("hang", 6, job="job-0", owner="ns/team")
    assert [one.owner for one in life.register.active] == ["uid/7", "uid/7", "uid/7", "ns/team"]
    assert life.register.refused == 2


def test_what_ended_and_what_is_explained_is_bounded_too(monkeypatch):
    monkeypatch.setattr(register_module, "MAX_ENDED", 10)
    monkeypatch.setattr(register_module, "MAX_SUPPRESSED", 10)
    life = Life()
    for number in range(50):
        life.found("hang", number, job=f"job-{number}")
        life.found("step_regression", number, job=f"job-{number}")
    assert len(life.register.state.suppressed) == 10
    for number in range(50):
        life.fine("hang", number, job_id=JobId("", f"job-{number}", ""))
    assert len(life.register.state.ended) == 10
    assert len(life.register.history) == 50
