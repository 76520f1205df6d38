"""An anomaly's life: opened once, updated, explained, closed when it is over, and continued."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.detection.life import LLAMA, Life
from tests.detection.streams import EPOCH_S
from warpwatch_detection.anomalies import register as register_module
from warpwatch_detection.anomalies import suppressed as suppressed_module
from warpwatch_telemetry.jobs import JobId


def test_what_comes_back_within_the_grace_is_the_same_anomaly():
    life = Life()
    (first,) = life.found("gc_pause", 0, rank=3, begin_step=70)
    (ended,) = life.fine("gc_pause", 60)
    (again,) = life.found("gc_pause", 180, rank=3, begin_step=400)
    assert ended.end_time == EPOCH_S + 60
    assert (again.id, again.time, again.begin_step) == (first.id, first.time, 70)
    assert (again.end_time, again.reopened) == (None, 1)
    assert list(life.register.history) == []


def test_what_comes_back_later_or_of_another_rank_is_another_anomaly():
    life = Life(reopen_s=120)
    life.found("gc_pause", 0, rank=3)
    life.fine("gc_pause", 60)
    life.found("gc_pause", 100, rank=4)
    life.fine("gc_pause", 110)
    life.found("gc_pause", 181, rank=3)
    assert len({anomaly.id for anomaly in life.changes}) == 3
    assert [anomaly.reopened for anomaly in life.register.active] == [0]


def test_without_a_grace_nothing_is_continued():
    life = Life(reopen_s=0)
    life.found("hang", 0)
    life.fine("hang", 1)
    life.found("hang", 2)
    assert len({anomaly.id for anomaly in life.changes}) == 2


def test_a_finding_that_lost_its_rank_for_a_moment_stays_one_anomaly():
    life = Life()
    life.found("straggler", 0, rank=2)
    life.found("straggler", 10)
    life.found("straggler", 20, rank=2)
    assert len({anomaly.id for anomaly in life.changes}) == 1
    assert life.active == [("straggler", 2)]


def test_another_rank_with_both_named_in_between_is_another_anomaly():
    life = Life()
    life.found("straggler", 0, rank=2)
    life.found("straggler", 10)
    ended, new = life.found("straggler", 20, rank=5)
    assert (ended.rank, ended.end_time) == (2, EPOCH_S + 20)
    assert (new.rank, new.end_time) == (5, None)
    assert new.id != ended.id


def test_a_culprit_that_goes_to_and_fro_becomes_one_anomaly_of_the_job():
    life = Life()
    (first,) = life.found("straggler", 0, rank=2)
    life.found("straggler", 20, rank=5)
    life.found("straggler", 40, rank=2)
    life.found("straggler", 60, rank=5)
    life.found("straggler", 80, rank=2)
    (now,) = life.register.active
    assert (now.id, now.rank, now.reopened) == (first.id, None, 1)
    assert [one.explained_by for one in life.register.history] == [first.id]
    assert len({anomaly.id for anomaly in life.changes}) == 2


def test_severity_goes_up_and_never_down_again():
    life = Life()
    for at, severity in enumerate(("info", "critical", "warning")):
        life.found("memory_pressure", at, rank=0, severity=severity)
    assert [one.severity for one in life.changes] == ["info", "critical", "critical"]


def test_events_are_held_after_the_last_one_and_states_until_they_are_over():
    life = Life(hold_s=600)
    life.found("crash", 0, rank=1)
    life.found("crash", 100, rank=1)
    life.found("hang", 0)
    assert life.register.deadline() == EPOCH_S + 700
    (closed,) = life.register.expire(EPOCH_S + 700)
    assert (closed.anomaly.kind, closed.anomaly.end_time) == ("crash", EPOCH_S + 700)
    assert life.active == [("hang", None)]


# --- causes ---


def test_what_a_cause_explains_is_not_raised_but_seen():
    life = Life()
    (cause,) = life.found("straggler", 0, rank=3)
    assert life.found("step_regression", 5) == []
    assert life.found("step_regression", 15) == []
    (suppressed,) = life.register.state.suppressed.values()
    assert (suppressed.kind, suppressed.cause, suppressed.cause_id) == (
        "step_regression", "straggler", cause.id,
    )  # fmt: skip
    assert (suppressed.since, suppressed.found.time) == (EPOCH_S + 5, EPOCH_S + 15)
    assert life.register.suppressed.counts == {("step_regression", "straggler"): 1}


def test_a_cause_that_comes_later_ends_what_it_explains():
    life = Life()
    (effect,) = life.found("step_regression", 0)
    cause, ended = life.found("straggler", 5, rank=3)
    assert (cause.kind, ended.id, ended.end_time) == ("straggler", effect.id, EPOCH_S + 5)
    assert ended.explained_by == cause.id
    assert life.found("step_regression", 10) == []
    assert life.active == [("straggler", 3)]


def test_an_effect_that_goes_on_without_its_cause_is_raised():
    life = Life()
    life.found("straggler", 0, rank=3)
    life.found("step_regression", 5)
    life.fine("straggler", 300)
    assert [len(life.found("step_regression", at)) for at in (310, 320, 330)] == [0, 0, 1]
    assert life.active == [("step_regression", None)]


def test_an_effect_that_fades_after_its_cause_is_not_raised():
    life = Life()
    life.found("straggler", 0, rank=3)
    life.found("step_regression", 5)
    life.fine("straggler", 300)
    life.found("step_regression", 310)
    life.fine("step_regression", 320)
    assert life.active == []
    assert life.register.state.suppressed == {}


def test_another_jobs_anomaly_explains_nothing():
    life = Life()
    life.found("straggler", 0, rank=3, job="bert")
    life.found("step_regression", 5)
    assert life.active == [("straggler", 3), ("step_regression", None)]


# --- devices ---


def test_a_devices_anomaly_gets_its_job_and_rank():
    life = Life()
    (throttled,) = life.found("thermal_throttle", 0, device="GPU-3")
    assert (throttled.job, throttled.rank, throttled.device) == ("llama", 3, "GPU-3")
    (unused,) = life.found("thermal_throttle", 0, device="GPU-9")
    assert (unused.job, unused.rank) == (None, None)


def test_two_ranks_on_one_device_share_its_anomaly():
    life = Life()
    life.rank_devices.jobs[LLAMA][4].device = "GPU-3"
    (throttled,) = life.found("thermal_throttle", 0, device="GPU-3")
    assert (throttled.job, throttled.rank) == ("llama", None)


@pytest.mark.parametrize("effect_first", [False, True])
def test_a_throttled_gpu_and_its_slow_rank_are_one_anomaly(effect_first):
    life = Life()
    order: list[Callable[[], object]] = [
        lambda: life.found("thermal_throttle", 0, "GPU 3 is throttled by heat", device="GPU-3"),
        lambda: life.found(
            "straggler", 0, "rank 3 computes 24 % longer", rank=3, severity="critical"
        ),
    ]
    for tell in reversed(order) if effect_first else order:
        tell()
    (one,) = life.register.active
    assert (one.kind, one.job, one.rank, one.severity) == (
        "thermal_throttle", "llama", 3, "critical",
    )  # fmt: skip
    assert one.effects == ("in llama rank 3 computes 24 % longer",)
    assert one.summary == "GPU 3 is throttled by heat; in llama rank 3 computes 24 % longer"
    ended = list(life.register.history)
    assert [anomaly.explained_by for anomaly in ended] == [one.id] * effect_first


def test_the_effect_is_found_with_its_newest_numbers():
    life = Life()
    life.found("clock_drop", 0, "GPU 3 is slow", device="GPU-3")
    life.found("straggler", 5, "24 % longer", rank=3)
    life.found("straggler", 15, "31 % longer", rank=3)
    life.found("clock_drop", 20, "GPU 3 is very slow", device="GPU-3")
    (one,) = life.register.active
    assert one.summary == "GPU 3 is very slow; in llama 31 % longer"


def test_a_slow_rank_on_another_device_has_another_cause():
    life = Life()
    life.found("thermal_throttle", 0, device="GPU-3")
    life.found("straggler", 5, rank=4)
    assert life.active == [("thermal_throttle", 3), ("straggler", 4)]


def test_a_slow_job_is_explained_by_its_devices_if_half_of_them_are_slow():
    life = Life()
    for rank in range(3):
        life.found("power_brake", rank, device=f"GPU-{rank}")
    assert len(life.found("step_regression", 5)) == 1
    changes = life.found("power_brake", 6, device="GPU-3")
    assert ("step_regression", EPOCH_S + 6) in [(one.kind, one.end_time) for one in changes]
    assert [kind for kind, _ in life.active] == ["power_brake"] * 4


def test_one_lost_device_explains_why_the_whole_job_hangs():
    life = Life()
    life.found("device_lost", 0, severity="critical", device="GPU-3")
    life.found("hang", 140)
    assert life.active == [("device_lost", 3)]


def test_a_device_that_idles_because_its_job_hangs_is_no_anomaly():
    life = Life()
    life.found("hang", 0)
    assert life.found("device_idle", 5, device="GPU-3") == []
    assert len(life.found("device_idle", 5, device="GPU-9")) == 1


# --- bounds ---


def test_the_end_of_a_job_leaves_nothing_of_its_states():
    life = Life()
    life.found("straggler", 0, rank=3)
    life.found("step_regression", 5)
    life.found("crash", 6, rank=3)
    (closed,) = life.register.end_job(LLAMA, EPOCH_S + 9)
    assert (closed.anomaly.kind, closed.anomaly.end_time) == ("straggler", EPOCH_S + 9)
    assert life.active == [("crash", 3)]
    assert (life.register.state.suppressed, life.register.state.ended) == ({}, {})


def test_more_anomalies_than_the_bound_are_refused_and_counted(monkeypatch):
    monkeypatch.setattr(register_module, "MAX_ACTIVE", 3)
    life = Life()
    for number in range(5):
        life.found("hang", number, job=f"job-{number}")
    assert len(life.active) == 3
    assert life.register.refused == 2
    life.fine("hang", 10, job_id=JobId("", "job-0", ""))
    life.found("hang", 11, job="job-4")
    assert len(life.active) == 3


def test_an_owner_with_many_anomalies_leaves_room_for_those_of_others(monkeypatch):
    monkeypatch.setattr(register_module, "MAX_ACTIVE_OF_OWNER", 3)
    life = Life()
    for number in range(5):
        life.found("hang", number, job=f"job-{number}", owner="uid/7")
    life.found("hang", 6, job="job-0", owner="ns/team")
    assert [one.owner for one in life.register.active] == ["uid/7", "uid/7", "uid/7", "ns/team"]
    assert life.register.refused == 2


def test_many_anomalies_of_jobs_leave_room_for_a_lost_device(monkeypatch):
    monkeypatch.setattr(register_module, "MAX_ACTIVE", 3)
    life = Life()
    for number in range(5):
        life.found("hang", number, job=f"job-{number}")
    (lost,) = life.found("device_lost", 6, severity="critical", device="GPU-99")
    assert (lost.kind, life.register.refused) == ("device_lost", 2)


def test_what_ended_and_what_is_explained_is_bounded_too(monkeypatch):
    monkeypatch.setattr(register_module, "MAX_ENDED", 10)
    monkeypatch.setattr(suppressed_module, "MAX_SUPPRESSED", 10)
    life = Life()
    for number in range(50):
        life.found("hang", number, job=f"job-{number}")
        life.found("step_regression", number, job=f"job-{number}")
    assert len(life.register.state.suppressed) == 10
    for number in range(50):
        life.fine("hang", number, job_id=JobId("", f"job-{number}", ""))
    assert len(life.register.state.ended) == 10
    assert len(life.register.history) == 50


def test_a_late_verdict_ends_nothing_before_it_began():
    life = Life()
    life.found("hang", 10)
    (ended,) = life.fine("hang", 5)
    assert (ended.time, ended.end_time) == (EPOCH_S + 10, EPOCH_S + 10)
