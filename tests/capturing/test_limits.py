"""The limits on captures and their cost, as golden files: the request, then the decision."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.exporters.states import rank as rank_state
from warpwatch_capturing.config import (
    BaselineConfig,
    RemoteStoreConfig,
    StoreConfig,
    TriggersConfig,
)
from warpwatch_capturing.participant import Reach, steps_ahead
from warpwatch_capturing.policy import Disk, DiskSpace, Known, Policy, Refusals, plan
from warpwatch_capturing.regular import Baseline
from warpwatch_telemetry.captures import CaptureRequest
from warpwatch_telemetry.errors import Refused

# 2026-09-21 23:30:00 UTC.
LATE_S = 1790033400.0
MANUAL = CaptureRequest("train", "torch", "manual", steps=20)
AUTOMATIC = replace(MANUAL, trigger="anomaly", anomaly_kind="straggler", anomaly_id="a1")
BASELINE = replace(MANUAL, trigger="baseline")


def test_a_capture_that_would_cost_too_much_has_fewer_steps_and_no_options(golden_case):
    text = ""
    for request, options in product((MANUAL, AUTOMATIC), ((), ("shapes",), ("stacks", "memory"))):
        asked = replace(request, options=options)
        for events, event_s, step_s in product(
            (100, 5_000, 30_000, 100_000, 150_000, 400_000, 3_000_000), (None, 2e-6), (0, 0.3, 4)
        ):
            found = plan(asked, Known(events, event_s), step_s)
            text += (
                f"{asked.trigger} {','.join(options)} {events} {event_s} {step_s}: {found.steps} "
                f"steps {','.join(found.request.options)} for {found.cost_s:.4g} s\n"
            )
    for asked in (replace(MANUAL, kind="memory"), MANUAL):
        known = Known(10**7) if asked.kind == "memory" else None
        text += f"{asked.kind} {known}: {plan(asked, known, 1.0)[1:]}\n"
    golden_case(text)


def said(policy: Policy, request: CaptureRequest, at: float, busy: tuple[int, ...] = ()) -> str:
    try:
        policy.check(request, busy, at)
    except Refused as refused:
        return f"{refused.reason}: {refused}"
    policy.add_start(request, at)
    return "taken"


class Room(Disk):
    """A disk of 1 TiB with the given free space."""

    def __init__(self, free: int) -> None:
        self.path, self.free = Path("/captures"), free

    def space(self) -> DiskSpace:
        return DiskSpace(1 << 40, self.free)


def day(requests: int, every_s: float, **config: Any) -> Iterator[str]:
    """Request captures of four kinds for each owner in turn; yield each change of the decision."""
    policy = Policy(TriggersConfig(**config), Room(1 << 40), lambda: LATE_S)
    before = ""
    for number in range(requests):
        kind, owner = f"kind{number % 4}", f"uid/{number % 3 // 2}"
        asked = replace(AUTOMATIC, anomaly_id=f"a{number}", anomaly_kind=kind, owner=owner)
        text = said(policy, asked, number * every_s)
        if text.partition(":")[0] != before:
            yield f"{number * every_s:.0f} s {kind} {owner} {text}\n"
        before = text.partition(":")[0]


def test_when_automatic_captures_are_taken_and_why_not(golden_case):
    text = "".join(day(1200, 90))
    text += "without limits but the cooldown:\n"
    text += "".join(day(60, 50, captures_per_hour=1000, captures_per_day=1000))
    quiet = TriggersConfig(quiet_hours=("23:00-23:31 UTC",))
    for free_mib in (52_000, 52_428, 52_429, 1 << 20):
        policy = Policy(TriggersConfig(), Room(free_mib << 20), lambda: LATE_S)
        text += f"{free_mib} MiB: {said(policy, MANUAL, 0.0)}\n"
    for config, request, busy in (
        (quiet, AUTOMATIC, ()), (quiet, MANUAL, ()), (quiet, replace(MANUAL, ranks=(1,)), (2, 3)),
        (quiet, MANUAL, (3, 2)), (quiet, BASELINE, ()),
    ):  # fmt: skip
        policy = Policy(config, Room(1 << 40), lambda: LATE_S)
        text += f"{request.trigger} {busy}: {said(policy, request, 0.0, busy)}\n"
    text += "dry run:\n"
    text += "".join(day(24, 50, dry_run=True))
    policy = Policy(TriggersConfig(captures_per_hour=1), Room(1 << 40), lambda: LATE_S)
    text += f"an anomaly: {said(policy, AUTOMATIC, 0.0)}\n"
    asked = [said(policy, BASELINE, 60.0 * number) for number in range(30)]
    text += f"baselines: {asked.count('taken')}, then {asked[-1]}\n"
    another = replace(AUTOMATIC, anomaly_id="a2", anomaly_kind="hang")
    text += f"another anomaly: {said(policy, another, 3600.0)}\n"
    golden_case(text)


def test_refusals_are_counted_when_they_are_new(golden_case):
    alert = replace(MANUAL, trigger="alert", anomaly_kind="hang")
    text = ""
    for request in (MANUAL, AUTOMATIC, alert):
        refusals = Refusals()
        asked = [(0, "busy"), (1, "busy"), (59, "busy"), (61, "busy"), (62, "disk"), (121, "disk"),
                 (123, "disk")]  # fmt: skip
        new = [refusals.is_new(request, reason, at) for at, reason in asked]
        refusals.forget(request)
        text += f"{request.trigger}: {new}, {refusals.is_new(request, 'disk', 124)} after one\n"
    golden_case(text)
    # The thousand newest are remembered.
    for number in range(1001):
        refusals.is_new(replace(AUTOMATIC, anomaly_id=f"a{number}"), "busy", 0.0)
    known = (replace(AUTOMATIC, anomaly_id=f"a{number}") for number in (1, 0))
    assert [refusals.is_new(request, "busy", 0.0) for request in known] == [False, True]


def test_where_captures_start_and_what_is_configured_by_default(golden_case):
    text = "".join(
        f"{attempt} {waited_s} {step_s}: {steps_ahead(Reach(2.0, 4), attempt, waited_s, step_s)}\n"
        for attempt, waited_s, step_s in product((1, 2, 3), (0, 0.7, 30), (0, 0.001, 0.1, 3, 100))
    )
    for section in (TriggersConfig(), StoreConfig(), RemoteStoreConfig()):
        text += section.model_dump_json(indent=1) + "\n"
    golden_case(text)


def test_which_healthy_jobs_have_a_baseline(golden_case):
    """By default the rank is 700 s old and has done 300 steps."""
    text = ""
    about: dict[str, Any]
    for about in (
        {}, {"device": None}, {"flops_per_token": 1e9}, {"flops_per_sample": 1e9},
        {"steps_total": 199}, {"steps_total": 200}, {"first_time": LATE_S - 599.0},
        {"first_time": LATE_S - 600.0}, {"status": "stopped"}, {"rank": 1}, {"world_size": 1},
        {"enabled": False},
    ):  # fmt: skip
        known: dict[str, Any] = {"first_time": LATE_S - 700.0, "steps_total": 300, "world_size": 2}
        known |= about
        config = TriggersConfig(baseline=BaselineConfig(enabled=known.pop("enabled", True)))
        ranks = (rank_state(known.pop("rank", 0), **known),)
        capturer = SimpleNamespace(config=config, is_busy=lambda job: False, captures=tuple)
        baseline = Baseline(capturer, SimpleNamespace(ranks=lambda ranks=ranks: ranks))
        for job in baseline.jobs(LATE_S):
            text += f"{about}: {baseline.due(job, (), LATE_S)}\n"
    golden_case(text)
