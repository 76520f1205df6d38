"""The limits on captures and their cost, as golden files: the request, then the decision."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from warpwatch_capturing.config import (
    TriggersConfig,
)
from warpwatch_capturing.policy import Disk, DiskSpace, Policy
from warpwatch_telemetry.captures import CaptureRequest
from warpwatch_telemetry.errors import Refused

# 2026-09-21 23:30:00 UTC.
LATE_S = 1790033400.0
MANUAL = CaptureRequest("train", "torch", "manual", steps=20)
AUTOMATIC = replace(MANUAL, trigger="anomaly", anomaly_kind="straggler", anomaly_id="a1")
BASELINE = replace(MANUAL, trigger="baseline")


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
