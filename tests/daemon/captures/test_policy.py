"""What may be captured, what the refusal says, and whose captures are finished first."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.captures.capture_node import ANOTHER, AUTOMATIC, MANUAL, CaptureNode
from tests.manual_clock import ManualClock
from warpwatch_daemon.captures import policy as policies
from warpwatch_daemon.captures.disk import MAX_AGE_S, Disk, Room
from warpwatch_daemon.captures.fair_queue import FairQueue
from warpwatch_daemon.captures.policy import DAY_S, HOUR_S, Policy, Refusals
from warpwatch_daemon.config.triggers import Span, TriggersConfig, parse_span
from warpwatch_telemetry.captures import CaptureRequest
from warpwatch_telemetry.errors import Refused

# 2026-09-21 23:30:00 UTC.
LATE_S = 1790033400.0
BASELINE = CaptureRequest("train", "torch", "baseline", (0,))


def policy(store: Path, **triggers: Any) -> Policy:
    return Policy(TriggersConfig(**triggers), Disk(store), lambda: LATE_S)


def of_anomaly(number: int) -> CaptureRequest:
    return replace(AUTOMATIC, anomaly_id=f"a{number}", anomaly_kind=f"kind{number}")


def test_a_budget_holds_for_an_hour_and_another_for_a_day(tmp_path):
    judge = policy(tmp_path, captures_per_hour=1, captures_per_day=2)
    judge.begun(of_anomaly(1), 0.0)
    with pytest.raises(Refused, match=r"1 captures in the last hour; triggers\.captures_per_hour"):
        judge.check(of_anomaly(2), (), HOUR_S - 1)
    judge.check(of_anomaly(2), (), HOUR_S)
    judge.begun(of_anomaly(2), HOUR_S)
    with pytest.raises(Refused) as refused:
        judge.check(of_anomaly(3), (), DAY_S - 1)
    assert refused.value.reason == "refused_budget"
    assert str(refused.value) == ("2 captures in the last day; triggers.captures_per_day is 2")
    judge.check(of_anomaly(3), (), DAY_S)


@pytest.mark.parametrize(("hourly", "left"), [(0, 0), (1, 1), (4, 2)])
def test_who_uses_up_the_budget_leaves_others_their_part(tmp_path, hourly, left):
    judge = policy(tmp_path, captures_per_hour=hourly, captures_per_day=100)
    for number in range(hourly):
        judge.begun(of_anomaly(number), 0.0)
    theirs = [replace(of_anomaly(10 + number), owner="ns/others") for number in range(left + 1)]
    for request in theirs[:left]:
        judge.check(request, (), 1.0)
        judge.begun(request, 1.0)
    with pytest.raises(Refused, match=f"captures_per_hour is {hourly}"):
        judge.check(theirs[left], (), 2.0)


def test_budgets_and_cooldowns_go_on_after_a_restart(node):
    node.coordinator.request(AUTOMATIC)
    node.clock.advance(300)
    node.restart(TriggersConfig(captures_per_day=1))
    judge = node.coordinator.policy
    with pytest.raises(Refused, match="captures_per_day is 1"):
        judge.check(of_anomaly(9), (), node.at)
    with pytest.raises(Refused, match="cooldown_s leaves 300 s"):
        judge.check(ANOTHER, (), node.at)


def test_refusals_count_again_when_they_are_new():
    refusals, alert = Refusals(), replace(MANUAL, trigger="alert")
    times = (0.0, 59.0, 60.0, 119.0)
    assert [refusals.is_new(alert, "a", at) for at in times] == [True, False, True, False]
    assert [refusals.is_new(AUTOMATIC, "a", at) for at in (0.0, DAY_S)] == [True, False]
    assert [refusals.is_new(MANUAL, "a", at) for at in (0.0, 1.0)] == [True, True]
    assert refusals.is_new(AUTOMATIC, "b", DAY_S)
    refusals.forget(AUTOMATIC)
    assert refusals.is_new(AUTOMATIC, "b", DAY_S)


def test_a_cooldown_is_of_one_run_and_not_of_the_same_anomaly(tmp_path):
    judge = policy(tmp_path)
    judge.begun(AUTOMATIC, 0.0)
    judge.check(AUTOMATIC, (), 1.0)
    with pytest.raises(Refused, match=r"captured for this 1 s ago; .*cooldown_s leaves 599 s"):
        judge.check(ANOTHER, (), 1.0)
    judge.check(replace(ANOTHER, run="r2"), (), 1.0)
    with pytest.raises(Refused, match="cooldown_s leaves 1 s"):
        judge.check(ANOTHER, (), 599.0)
    judge.check(ANOTHER, (), 600.0)


def test_a_manual_request_skips_cooldown_budgets_quiet_hours_and_dry_run(tmp_path):
    budgets = {"captures_per_hour": 0, "captures_per_day": 0}
    judge = policy(tmp_path, **budgets, dry_run=True, quiet_hours=("00:00-24:00",))
    judge.begun(MANUAL, 0.0)
    judge.check(MANUAL, (), 1.0)
    with pytest.raises(Refused, match="rank 0 of train is being captured"):
        judge.check(MANUAL, (0,), 1.0)


def test_baselines_of_ever_new_jobs_have_a_budget_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(policies, "BASELINES_PER_DAY", 2)
    judge = policy(tmp_path)
    for number in range(2):
        sweep = replace(BASELINE, job=f"trial-{number}")
        judge.check(sweep, (), float(number))
        judge.begun(sweep, float(number))
    third = replace(BASELINE, job="trial-2")
    with pytest.raises(Refused) as refused:
        judge.check(third, (), DAY_S - 1)
    assert refused.value.reason == "refused_budget"
    allowed = "2 baselines and scheduled ones are allowed"
    assert str(refused.value) == f"2 captures in the last day; {allowed}"
    judge.check(AUTOMATIC, (), 3.0)
    judge.check(third, (), DAY_S)


def test_a_baseline_counts_against_no_budget_of_anomalies_and_keeps_the_quiet(tmp_path):
    judge = policy(tmp_path, captures_per_hour=1)
    judge.begun(BASELINE, 0.0)
    judge.check(AUTOMATIC, (), 1.0)
    judge.begun(AUTOMATIC, 1.0)
    judge.check(BASELINE, (), 2.0)
    judge.config = TriggersConfig(quiet_hours=("23:00-06:00 UTC",))
    with pytest.raises(Refused, match=r"triggers\.quiet_hours has 23:00-06:00 UTC"):
        judge.check(BASELINE, (), 2.0)


def test_quiet_hours_are_local_unless_they_say_utc(tmp_path, monkeypatch, stack):
    # Local time is seven hours ahead: 06:30 when it is 23:30 UTC.
    stack.callback(time.tzset)
    stack.callback(monkeypatch.undo)
    monkeypatch.setenv("TZ", "WWT-7")
    time.tzset()
    judge = policy(tmp_path, quiet_hours=("22:00-06:00 UTC",))
    with pytest.raises(Refused) as refused:
        judge.check(AUTOMATIC, (), 0.0)
    assert refused.value.reason == "refused_quiet_hours"
    judge.config = TriggersConfig(quiet_hours=("22:00-06:00",))
    judge.check(AUTOMATIC, (), 0.0)
    judge.config = TriggersConfig(quiet_hours=("12:00-13:00", "06:30-06:31"))
    with pytest.raises(Refused, match=r"triggers\.quiet_hours has 06:30-06:31"):
        judge.check(AUTOMATIC, (), 0.0)


def test_spans_of_the_day_are_read_and_others_refused_with_an_example():
    assert parse_span("22:00-06:00") == Span(1320, 360)
    assert parse_span(" 00:00 - 24:00 ") == Span(0, 1440)
    assert parse_span("09:05-09:06") == Span(545, 546)
    bad = ("", "22-6", "22:00", "24:00-06:00", "22:00-24:01", "22:60-06:00", "06:00-06:00", "9")
    for text in bad:
        with pytest.raises(ValueError, match="such as 22:00-06:00 or 22:00-06:00 UTC"):
            parse_span(text)


def test_a_dry_run_decides_as_it_would_and_takes_nothing(tmp_path, stack):
    node = CaptureNode(tmp_path, stack, dry_run=True)
    with pytest.raises(Refused, match=r"would have been taken; triggers\.dry_run is on"):
        node.coordinator.request(AUTOMATIC)
    with pytest.raises(Refused, match="cooldown_s leaves"):
        node.coordinator.request(replace(AUTOMATIC, anomaly_id="a2"))
    assert node.counted("refused_dry_run", "anomaly") == 1
    assert node.counted("refused_cooldown", "anomaly") == 1
    assert list(node.store.path.glob("*/*/*/*")) == []


class FakeDisk(Disk):
    """Of 1,000 MiB. free_mib: what it says next."""

    def __init__(self, free_mib: int, clock: ManualClock) -> None:
        self.free_mib = free_mib
        super().__init__(Path("/store"), clock.monotonic)

    def _read(self) -> Room:
        return Room(1000 << 20, self.free_mib << 20)


def test_a_disk_that_is_full_or_gone_or_hangs_is_a_refusal_without_touching_it():
    clock = ManualClock()
    disk = FakeDisk(199, clock)
    judge = Policy(TriggersConfig(), disk)
    with pytest.raises(Refused, match=r"199 MiB free in /store, 200 MiB are needed") as refused:
        judge.check(MANUAL, (), 0.0)
    assert refused.value.reason == "refused_disk"
    disk.free_mib = 200
    disk.measure()
    disk.free_mib = 0
    clock.advance(MAX_AGE_S)
    judge.check(MANUAL, (), 0.0)
    clock.advance(1)
    with pytest.raises(Refused, match=r"/store has not answered for 61 s") as refused:
        judge.check(MANUAL, (), 0.0)
    assert refused.value.reason == "refused_disk"
    with pytest.raises(Refused, match="gone: No such file or directory"):
        policy(Path("/gone")).check(MANUAL, (), 0.0)


def test_what_came_to_nothing_for_want_of_room_counts_against_no_budget(tmp_path):
    judge = policy(tmp_path, captures_per_hour=1)
    judge.begun(AUTOMATIC, 5.0)
    with pytest.raises(Refused, match="cooldown_s leaves"):
        judge.check(ANOTHER, (), 6.0)
    judge.withdrawn(AUTOMATIC, 5.0)
    judge.check(ANOTHER, (), 6.0)


def test_owners_are_served_in_turn_however_much_one_of_them_has():
    queue, done = FairQueue(10), list[str]()
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        assert queue.put(name[0], partial(done.append, name))
    while queue.do_next():
        pass
    assert done == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_an_owner_with_too_much_has_no_more_taken_and_others_have():
    queue, done = FairQueue(2), list[str]()
    taken = [queue.put("a", partial(done.append, str(n))) for n in range(4)]
    assert taken == [True, True, False, False]
    assert queue.put("b", partial(int, "x"))
    assert queue.do_next()
    # Work that fails is not done again.
    with pytest.raises(ValueError, match="'x'"):
        queue.do_next()
    assert [queue.do_next() for _ in range(2)] == [True, False]
    assert done == ["0", "1"]
