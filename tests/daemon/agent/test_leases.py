from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from warpwatch_daemon.agent.leases import Leases
from warpwatch_detection.anomalies.changes import Change
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId

JOB = JobId("ns/team", "llama", "41")
HANG = Anomaly(
    time=1.0, severity="warning", summary="", **JOB.fields(), id="1", kind="hang"
)  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(anomaly: Anomaly) -> list[Change]:
    return [Change("opened", anomaly)]


def test_what_is_found_of_a_leased_job_is_kept_back_and_shown_nowhere(clock):
    leases = Leases(clock)
    leases.take(JOB, "fleet", 60.0)
    assert leases.raised(opened(HANG)) == []
    assert leases.raised([Change("updated", HANG), Change("closed", HANG)]) == []
    assert leases.shown([HANG]) == ()


def test_other_jobs_and_what_a_node_alone_can_judge_are_raised(clock):
    leases = Leases(clock)
    leases.take(JOB, "fleet", 60.0)
    others = [replace(HANG, id="2", run="42"), replace(HANG, id="3", kind="memory_leak")]
    for other in others:
        assert leases.raised(opened(other)) == opened(other)
        assert leases.shown([other]) == (other,)


def test_what_was_raised_before_the_lease_goes_on_as_it_was(clock):
    leases = Leases(clock)
    assert leases.raised(opened(HANG)) == opened(HANG)
    leases.take(JOB, "fleet", 60.0)
    closed = [Change("closed", HANG)]
    assert leases.raised(closed) == closed


def test_when_the_fleet_is_gone_what_is_still_so_is_raised_once(clock):
    leases = Leases(clock)
    leases.take(JOB, "fleet", 60.0)
    over = replace(HANG, id="2")
    leases.raised(opened(HANG) + opened(over))
    clock.now += 59
    assert leases.expire([HANG]) == []
    clock.now += 1
    assert leases.expire([HANG]) == opened(HANG)
    assert leases.expire([HANG]) == []
    assert leases.shown([HANG, over]) == (HANG,)
    assert leases.raised([Change("closed", HANG)]) == [Change("closed", HANG)]


def test_a_lease_that_is_renewed_goes_on(clock):
    leases = Leases(clock)
    leases.take(JOB, "fleet", 60.0)
    leases.raised(opened(HANG))
    clock.now += 50
    leases.take(JOB, "fleet", 60.0)
    clock.now += 50
    assert leases.expire([HANG]) == []


def test_a_second_fleet_is_refused_until_the_first_is_gone(clock):
    leases = Leases(clock)
    leases.take(JOB, "fleet-0", 60.0)
    with pytest.raises(Refused, match="fleet-0 judges this job"):
        leases.take(JOB, "fleet-1", 60.0)
    clock.now += 61
    leases.take(JOB, "fleet-1", 60.0)


def test_what_the_fleet_had_raised_goes_on_under_its_id_until_one_judges_again(clock):
    leases = Leases(clock)
    leases.take(JOB, "fleet", 60.0, {"hang": "1-f"})
    leases.raised(opened(HANG))
    clock.now += 60
    (change,) = leases.expire([HANG])
    assert (change.what, change.anomaly.id) == ("reopened", "1-f")
    assert [one.id for one in leases.shown([HANG])] == ["1-f"]
    (update,) = leases.raised([Change("updated", HANG)])
    assert update.anomaly.id == "1-f"
    leases.take(JOB, "fleet", 60.0, {"hang": "1-f"})
    (change,) = leases.expire([HANG])
    assert (change.what, change.anomaly.id) == ("closed", "1-f")
    assert leases.shown([HANG]) == ()
    assert leases.raised([Change("closed", HANG)]) == []


def test_another_daemon_keeps_back_what_this_one_did_until_the_lease_ends(clock):
    before, after = Leases(clock), Leases(clock)
    before.take(JOB, "fleet", 60.0, {"hang": "1-f"})
    before.raised(opened(HANG))
    saved = msgspec.msgpack.encode(before.state)
    after.state = msgspec.msgpack.decode(saved, type=type(before.state))
    assert after.shown([HANG]) == ()
    clock.now += 55
    assert after.expire([HANG]) == []
    clock.now += 6
    assert [one.anomaly.id for one in after.expire([HANG])] == ["1-f"]


def test_what_an_agent_finds_soon_after_the_fleet_went_is_what_that_had_raised(clock):
    leases = Leases(clock)
    leases.take(JOB, "fleet", 60.0, {"hang": "1-f"})
    clock.now += 120
    (change,) = leases.raised(opened(HANG))
    assert (change.what, change.anomaly.id) == ("reopened", "1-f")
    assert leases.raised(opened(replace(HANG, id="2", kind="crash")))[0].what == "opened"
    clock.now += 600
    leases.expire([])
    assert leases.raised(opened(replace(HANG, id="3")))[0].what == "opened"
