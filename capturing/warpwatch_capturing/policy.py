"""Decides whether a capture may start now, and how much of it; refusals are counted by reason."""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from warpwatch_capturing.config import TriggersConfig, quiet
from warpwatch_telemetry.captures import REGULAR_TRIGGERS, CaptureRequest
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId, Owner
from warpwatch_telemetry.newest import NewestMap

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
SPANS_S = {"hour": HOUR_S, "day": DAY_S}
# For all jobs together, so that a sweep of short, newly named jobs is not profiled all day.
BASELINES_PER_DAY = 24
# The expected size of a capture; twice as much must be free in the store's file system.
EXPECTED_BYTES = 100 << 20
# At least this share of the file system must be free, too.
MIN_FREE_SHARE = 0.05


class _Start(NamedTuple):
    """A started capture: its time (monotonic) and its owner."""

    at: float
    owner: str


class NoLimits:
    """A policy that allows all captures. ``at`` is monotonic; a reload replaces ``config``."""

    def __init__(self, config: TriggersConfig) -> None:
        self.config = config

    def check(self, request: CaptureRequest, busy: Collection[int], at: float) -> None:
        """Raise Refused if none may start now. busy: the job's ranks that are being captured."""

    def add_start(self, request: CaptureRequest, at: float) -> None:
        """Count a started capture against budgets and cooldown."""

    def remove_start(self, request: CaptureRequest, at: float) -> None:
        """Uncount a capture that was started ``at`` and recorded nothing."""


class Policy(NoLimits):
    """The limits on captures of this node.

    Every request needs idle ranks and free disk space. Automatic requests must also be within the
    limits of ``triggers``; baselines and a fleet's schedules have a budget of their own instead,
    and no cooldown. ``check`` touches no file, because detection waits for it.
    disk: the disk of the store. wall: the wall clock.
    excess: returns the quota that an owner exceeds, or None.
    """

    def __init__(
        self,
        config: TriggersConfig,
        disk: Disk,
        wall: Callable[[], float] = time.time,
        excess: Callable[[Owner], str | None] = lambda owner: None,
    ) -> None:
        super().__init__(config)
        self._disk = disk
        self._wall = wall
        self._excess = excess
        # The captures of the last day that count against budgets, oldest first.
        self._automatic: deque[_Start] = deque()
        self._baselines: deque[_Start] = deque()
        # Per job and kind: the time of the last capture, and the id of its anomaly.
        self._last: dict[tuple[JobId, str], tuple[float, str | None]] = {}

    def check(self, request: CaptureRequest, busy: Collection[int], at: float) -> None:
        automatic = request.trigger != "manual"
        if automatic:
            self._check_quiet_hours()
        self._forget(at)
        if request.trigger in REGULAR_TRIGGERS:
            self._check_budget(request, self._baselines, at, "day", BASELINES_PER_DAY)
        elif automatic:
            self._check_cooldown(request, at)
            hourly, daily = self.config.captures_per_hour, self.config.captures_per_day
            self._check_budget(request, self._automatic, at, "hour", hourly)
            self._check_budget(request, self._automatic, at, "day", daily)
        overlap = sorted(set(busy) if request.ranks is None else set(busy) & set(request.ranks))
        if overlap:
            ranks = ", ".join(map(str, overlap))
            raise Refused("refused_busy", f"rank {ranks} of {request.job} is being captured")
        self._check_disk()
        if automatic and self.config.dry_run:
            # A capture that a dry run leaves out counts, so that later decisions are the real ones.
            self.add_start(request, at)
            raise Refused("refused_dry_run", "it would have been taken; triggers.dry_run is on")

    def check_owners(self, owners: Iterable[Owner]) -> None:
        """Raise Refused if an owner of the ranks exceeds its quota."""
        for owner in owners:
            excess = self._excess(owner)
            if excess is not None:
                raise Refused("refused_quota", f"the owner of the job has {excess}")

    def add_start(self, request: CaptureRequest, at: float) -> None:
        if request.trigger in REGULAR_TRIGGERS:
            self._baselines.append(_Start(at, request.owner))
        elif request.trigger != "manual":
            self._automatic.append(_Start(at, request.owner))
            self._last[_key(request)] = (at, request.anomaly_id)
        self._forget(at)

    def remove_start(self, request: CaptureRequest, at: float) -> None:
        starts = self._baselines if request.trigger in REGULAR_TRIGGERS else self._automatic
        start = _Start(at, request.owner)
        if request.trigger != "manual" and start in starts:
            starts.remove(start)
            self._last.pop(_key(request), None)

    def _check_quiet_hours(self) -> None:
        span = quiet(self.config.quiet_hours, self._wall())
        if span is not None:
            raise Refused("refused_quiet_hours", f"triggers.quiet_hours has {span}")

    def _check_cooldown(self, request: CaptureRequest, at: float) -> None:
        last, anomaly_id = self._last.get(_key(request), (-math.inf, None))
        if anomaly_id is not None and anomaly_id == request.anomaly_id:
            # The last capture was for this anomaly and was interrupted: it may be repeated at once.
            return
        since_s = at - last
        if since_s < self.config.cooldown_s:
            rest_s = self.config.cooldown_s - since_s
            raise Refused(
                "refused_cooldown",
                f"{request.job} was captured for this {since_s:.0f} s ago; "
                f"triggers.cooldown_s leaves {rest_s:.0f} s",
            )

    @staticmethod
    def _check_budget(
        request: CaptureRequest, starts: Collection[_Start], at: float, span: str, allowed: int
    ) -> None:
        """Check a budget of ``allowed`` captures per ``span``, a key of SPANS_S. Raises Refused.

        The budget is for the node. If it is used up, an owner may still start captures until it has
        had an equal part of it.
        """
        taken = Counter(start.owner for start in starts if at - start.at < SPANS_S[span])
        total, own = taken.total(), taken[request.owner]
        part = max(min(1, allowed), allowed // len(taken.keys() | {request.owner}))
        if total >= allowed and own >= part:
            limit = f"triggers.captures_per_{span} is {allowed}"
            if request.trigger in REGULAR_TRIGGERS:
                limit = f"{allowed} baselines and scheduled ones are allowed"
            raise Refused("refused_budget", f"{total} captures in the last {span}; {limit}")

    def _check_disk(self) -> None:
        space = self._disk.space()
        wanted = max(2 * EXPECTED_BYTES, int(MIN_FREE_SHARE * space.total))
        if space.free < wanted:
            raise Refused(
                "refused_disk",
                f"{space.free >> 20} MiB free in {self._disk.path}, {wanted >> 20} MiB are needed; "
                "free some or set store.url",
            )

    def _forget(self, at: float) -> None:
        for starts in (self._automatic, self._baselines):
            while starts and at - starts[0].at >= DAY_S:
                starts.popleft()
        horizon = at - max(self.config.cooldown_s, HOUR_S)
        self._last = {key: last for key, last in self._last.items() if last[0] >= horizon}


def _key(request: CaptureRequest) -> tuple[JobId, str]:
    return (request.job_id, request.anomaly_kind or request.kind)


# Alertmanager repeats a firing alert for hours, and within seconds if it was refused.
ALERT_REPEAT_S = 60.0
MAX_REMEMBERED = 1000


class Refusals:
    """The refusals that were counted last, so that a repeated request is counted once.

    A user's refusals all count. An anomaly's counts if its reason has changed. An alert's (by job
    and kind) counts if its reason has changed, and every ALERT_REPEAT_S. ``at`` is monotonic.
    """

    def __init__(self) -> None:
        # Per requester: the last reason, and when it was counted.
        self._last: NewestMap[tuple[str, ...], tuple[str, float]] = NewestMap(MAX_REMEMBERED)

    def is_new(self, request: CaptureRequest, reason: str, at: float) -> bool:
        """Return whether to count this refusal, and remember it."""
        key = _requester(request)
        if key is None:
            return True
        last, counted_at = self._last.get(key, ("", at))
        lasts = request.trigger == "anomaly" or at - counted_at < ALERT_REPEAT_S
        is_known = reason == last and lasts
        self._last[key] = (reason, counted_at if is_known else at)
        return not is_known

    def forget(self, request: CaptureRequest) -> None:
        """Make the next refusal count, as a capture has succeeded."""
        key = _requester(request)
        if key is not None:
            self._last.pop(key, None)


def _requester(request: CaptureRequest) -> tuple[str, ...] | None:
    if request.anomaly_id is not None:
        return (request.anomaly_id,)
    if request.trigger == "alert":
        return (*request.job_id, request.anomaly_kind or request.kind)
    return None


# An older measurement means that the file system hangs: agent.capturing measures more often.
MAX_AGE_S = 60.0


class DiskSpace(NamedTuple):
    """The size and free space of a file system, in bytes."""

    total: int
    free: int


class Disk:
    """The disk of the store.

    ``measure`` may wait for the file system, so it has a loop of its own; ``space`` never waits.
    """

    def __init__(self, path: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._monotonic = monotonic
        self.measure()

    def measure(self) -> None:
        found: DiskSpace | str
        try:
            found = self._read()
        except OSError as error:
            found = str(error.strerror)
        self._measured = (self._monotonic(), found)

    def _read(self) -> DiskSpace:
        usage = shutil.disk_usage(self.path)
        return DiskSpace(usage.total, usage.free)

    def space(self) -> DiskSpace:
        """Return the last measurement. Raises Refused if it failed or is too old."""
        at, found = self._measured
        age_s = self._monotonic() - at
        if isinstance(found, str):
            raise Refused("refused_disk", f"{self.path}: {found}")
        if age_s > MAX_AGE_S:
            raise Refused("refused_disk", f"{self.path} has not answered for {age_s:.0f} s")
        return found


# --- the cost of a capture, before it starts ---

# Per trace of one rank: steps that would record more events are left out.
MAX_EVENTS = 1_000_000
# Seconds of the training thread per event, to record, stop and export it; options multiply them.
# Medians with torch 2.13 on the CPU, of traces of 150,000 events on a busy machine.
EVENT_S = 8e-6
TIMES = {"shapes": 3.0, "stacks": 2.0, "memory": 2.0}
# A capture may cost as much as the steps take that it records, and this much in any case.
MIN_COST_S = 1.0


class Known(NamedTuple):
    """Events per step, and seconds per event (None: not measured), of a job's traces."""

    events: int
    event_s: float | None = None


class Plan(NamedTuple):
    """The request to the ranks, and its expected cost; None if nothing is known."""

    request: CaptureRequest
    steps: int
    cost_s: float | None = None


def plan(request: CaptureRequest, known: Known | None, step_s: float) -> Plan:
    """Return the request with fewer steps, and without options, where it would cost too much.

    step_s: the job's median step, 0 if it is not known. Options that a user requested are kept.
    """
    if known is None or request.kind != "torch":
        return Plan(request, request.steps)
    limit_s = max(MIN_COST_S, step_s)
    one_s = known.events * (known.event_s or _event_s(request))
    if request.options and request.trigger != "manual" and one_s > limit_s:
        request = replace(request, options=())
        one_s = known.events * EVENT_S
    steps = min(request.steps, MAX_EVENTS // known.events)
    if one_s > step_s:
        steps = min(steps, int(MIN_COST_S // one_s))
    steps = max(1, steps)
    return Plan(request, steps, steps * one_s)


def _event_s(request: CaptureRequest) -> float:
    return EVENT_S * max((TIMES.get(option, 1.0) for option in request.options), default=1.0)
