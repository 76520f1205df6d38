"""Jobs that a fleet judges: what their node keeps back, and what it goes on with afterwards."""

from dataclasses import replace

import msgspec
import pytest

from tests.manual_clock import ManualClock
from warpwatch_daemon.for_fleet.leases import JobLeases
from warpwatch_detection.anomalies.register import Change
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId

JOB = JobId("ns/team", "llama", "41")
HANG = Anomaly(
    time=1.0, severity="warning", summary="", **JOB.fields(), id="1", kind="hang"
)  # fmt: skip
NAMED = {"hang": "1-f"}


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def leases(clock):
    return JobLeases(clock.monotonic, clock.wall)


def opened(anomaly: Anomaly) -> list[Change]:
    return [Change("opened", anomaly)]


def test_of_a_leased_job_only_what_a_node_alone_can_judge_is_raised(leases):
    leases.acquire(JOB, "fleet", 60.0)
    assert leases.raised(opened(HANG)) == []
    assert leases.raised([Change("updated", HANG), Change("closed", HANG)]) == []
    assert leases.shown([HANG]) == ()
    for other in (replace(HANG, id="2", run="42"), replace(HANG, id="3", kind="memory_leak")):
        assert leases.raised(opened(other)) == opened(other)
        assert leases.shown([other]) == (other,)


def test_what_was_raised_before_the_lease_goes_on_as_it_was(leases):
    assert leases.raised(opened(HANG)) == opened(HANG)
    leases.acquire(JOB, "fleet", 60.0)
    closed = [Change("closed", HANG)]
    assert leases.raised(closed) == closed


def test_when_the_fleet_is_gone_what_is_still_so_is_raised_once(leases, clock):
    leases.acquire(JOB, "fleet", 60.0)
    over = replace(HANG, id="2")
    leases.raised(opened(HANG) + opened(over))
    clock.advance(59.0)
    assert leases.expire([HANG]) == []
    clock.advance(1.0)
    assert leases.expire([HANG]) == opened(HANG)
    assert leases.expire([HANG]) == []
    assert leases.shown([HANG, over]) == (HANG,)
    assert leases.raised([Change("closed", HANG)]) == [Change("closed", HANG)]


def test_a_lease_that_is_renewed_goes_on_and_no_second_fleet_gets_it(leases, clock):
    leases.acquire(JOB, "fleet-0", 60.0)
    leases.raised(opened(HANG))
    clock.advance(50.0)
    leases.acquire(JOB, "fleet-0", 60.0)
    clock.advance(50.0)
    assert leases.expire([HANG]) == []
    with pytest.raises(Refused, match="the fleet fleet-0 evaluates this job"):
        leases.acquire(JOB, "fleet-1", 60.0)
    clock.advance(11.0)
    leases.acquire(JOB, "fleet-1", 60.0)


def test_leases_and_what_is_kept_back_have_a_bound(leases):
    for number in range(41, 1065):
        leases.acquire(JOB._replace(run=str(number)), "fleet", 60.0)
    with pytest.raises(Refused, match="1024 jobs are evaluated by fleets already"):
        leases.acquire(JOB._replace(run="2000"), "fleet", 60.0)
    leases.acquire(JOB, "fleet", 60.0)
    for number in range(2001):
        leases.raised(opened(replace(HANG, id=str(number))))
    assert list(leases.state.kept_back) == [str(number) for number in range(1, 2001)]


def test_what_the_fleet_had_raised_goes_on_under_its_id_until_one_judges_again(leases, clock):
    leases.acquire(JOB, "fleet", 60.0, NAMED)
    leases.raised(opened(HANG))
    clock.advance(60.0)
    (change,) = leases.expire([HANG])
    assert (change.what, change.anomaly.id) == ("reopened", "1-f")
    assert [one.id for one in leases.shown([HANG])] == ["1-f"]
    (update,) = leases.raised([Change("updated", HANG)])
    assert update.anomaly.id == "1-f"
    assert leases.is_of_fleet(update.anomaly) and not leases.is_of_fleet(HANG)
    leases.acquire(JOB, "fleet", 60.0, NAMED)
    (change,) = leases.expire([HANG])
    assert (change.what, change.anomaly.id) == ("closed", "1-f")
    assert change.anomaly.end_time == clock.wall()
    assert leases.shown([HANG]) == ()
    assert leases.raised([Change("closed", HANG)]) == []


def test_another_daemon_keeps_back_what_this_one_did_until_the_lease_ends(leases, clock):
    leases.acquire(JOB, "fleet", 60.0, NAMED)
    leases.raised(opened(HANG))
    saved = msgspec.msgpack.encode(leases.state)
    # The machine has started anew: monotonic time counts from another moment.
    later = ManualClock(monotonic=5.0, wall=clock.wall())
    after = JobLeases(later.monotonic, later.wall)
    after.state = msgspec.msgpack.decode(saved, type=type(leases.state))
    assert after.shown([HANG]) == ()
    later.advance(55.0)
    assert after.expire([HANG]) == []
    later.advance(6.0)
    assert [one.anomaly.id for one in after.expire([HANG])] == ["1-f"]


def test_what_an_agent_finds_soon_after_the_fleet_went_is_what_that_had_raised(leases, clock):
    leases.acquire(JOB, "fleet", 60.0, NAMED)
    clock.advance(120.0)
    assert leases.expire([]) == []
    (change,) = leases.raised(opened(HANG))
    assert (change.what, change.anomaly.id) == ("reopened", "1-f")
    assert leases.raised(opened(replace(HANG, id="2", kind="crash")))[0].what == "opened"
    clock.advance(600.0)
    leases.expire([])
    assert leases.raised(opened(replace(HANG, id="3")))[0].what == "opened"
