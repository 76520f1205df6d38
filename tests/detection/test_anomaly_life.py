"""An anomaly's life: opened once, updated, explained, closed when it is over, and continued."""

from collections import Counter
from typing import Any

import pytest

from tests.cases import cases
from tests.detection.life import LLAMA, Life
from tests.detection.streams import EPOCH_S
from warpwatch_detection.anomalies import register as register_module
from warpwatch_detection.anomalies.explanation import DEVICE_CAUSES, EXPLAINED_BY, JOB_CAUSES
from warpwatch_detection.anomalies.register import FOUND_ONCE
from warpwatch_detection.ranks import LiveRank
from warpwatch_telemetry.anomalies import DEVICE_KINDS, EVENT_KINDS
from warpwatch_telemetry.jobs import JobId

CASES = cases(__file__)
STORIES = CASES["stories"]


@pytest.mark.parametrize("name", STORIES)
def test_what_is_active_is_what_lasts(name, golden_case):
    story = STORIES[name]
    life = Life(**story.get("config", {}))
    life.tell(story["story"])
    golden_case(life.story())
    said = [kind if rank is None else f"{kind} {rank}" for kind, rank in life.active]
    assert ", ".join(said) == story["active"]
    assert len({anomaly.id for anomaly in life.changes}) == story["count"]
    assert all(one.end_time is None or one.end_time >= one.time for one in life.changes)
    if not said:
        assert life.register.state.suppressed == {}


@pytest.mark.parametrize(
    ("begin_step", "values", "raised_after"),
    [(500, (0.3, 0.2, 0.1, 0.05), None), (499, (0.3, 0.2, 0.3, 0.4), 4), (501, (0.3,), 1)],
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


@pytest.mark.parametrize(("cause", "effect", "explained"), CASES["stops"])
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
    assert (unused.job, unused.rank, unused.gpu) == (None, None, None)
    life.rank_devices.indices["GPU-9"] = 9
    assert [one.gpu for one in life.found("thermal_throttle", 1, device="GPU-9")] == [9]
    life.rank_devices.jobs[LLAMA][5].device = "GPU-4"
    (shared,) = life.found("thermal_throttle", 0, device="GPU-4")
    assert (shared.job, shared.rank) == ("llama", None)
    # Nor does the slow rank that it explains make it one of that rank alone.
    assert [one.rank for one in life.found("straggler", 1, rank=4)] == [None]
    # A rank of each of two jobs.
    life.rank_devices.jobs[JobId("", "bert", "")] = {0: LiveRank(device="GPU-7")}
    assert [one.job for one in life.found("thermal_throttle", 0, device="GPU-7")] == [None]
    # Two ranks of another job are on it now.
    bert = {rank: LiveRank(device="GPU-3") for rank in (0, 1)}
    for jobs, job, rank in (({}, "llama", 3), ({JobId("", "bert", ""): bert}, "bert", None)):
        life.rank_devices.jobs = jobs
        (throttled,) = life.found("thermal_throttle", 10, device="GPU-3")
        assert (throttled.job, throttled.rank) == (job, rank)


# --- bounds ---


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
        life.found("crash", number, job=f"job-{number}")
    life.found("hang", 6, job="job-0", owner="ns/team")
    owners = Counter(one.owner for one in life.register.active)
    assert owners == {"uid/7": 3, "ns/team": 1, "": 5}
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
