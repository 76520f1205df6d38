"""Decides whether a capture may start now; every refusal has a reason that is counted."""

from __future__ import annotations

import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
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
# And at least this share of it.
MIN_FREE_SHARE = 0.05


class _Begun(NamedTuple):
    """A started capture: its time (monotonic) and its owner."""

    at: float
    owner: str


class Policy:
    """Busy ranks and the disk hold for all, what ``triggers`` says for automatic requests.

    Baselines and a fleet's schedules have a budget of their own and no cooldown. ``check``
    touches no file, for detection waits for it. ``disk``: the store's; ``at`` is monotonic,
    ``wall`` the wall clock. ``excess`` returns the quota that an owner exceeds.
    """

    def __init__(
        self,
        config: TriggersConfig,
        disk: Disk,
        wall: Callable[[], float] = time.time,
        excess: Callable[[Owner], str | None] = lambda owner: None,
    ) -> None:
        self.config = config
        self._disk = disk
        self._wall = wall
        self._excess = excess
        # The captures of the last day that count: when they were begun, and whose they were.
        self._automatic: deque[_Begun] = deque()
        self._baselines: deque[_Begun] = deque()
        # Per job and kind: when, and for which anomaly.
        self._last: dict[tuple[JobId, str], tuple[float, str | None]] = {}

    def check(self, request: CaptureRequest, busy: Collection[int], at: float) -> None:
        """Raise Refused if not now. ``busy``: ranks of the job that are being captured."""
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
            # So that it goes on to decide as it would: what it would have taken counts.
            self.begun(request, at)
            raise Refused("refused_dry_run", "it would have been taken; triggers.dry_run is on")

    def check_owners(self, owners: Iterable[Owner]) -> None:
        """Raise Refused if an owner of the ranks exceeds its quota."""
        for owner in owners:
            excess = self._excess(owner)
            if excess is not None:
                raise Refused("refused_quota", f"the owner of the job has {excess}")

    def begun(self, request: CaptureRequest, at: float) -> None:
        """Count a started capture against budgets and cooldown."""
        if request.trigger in REGULAR_TRIGGERS:
            self._baselines.append(_Begun(at, request.owner))
        elif request.trigger != "manual":
            self._automatic.append(_Begun(at, request.owner))
            self._last[_key(request)] = (at, request.anomaly_id)
        self._forget(at)

    def withdrawn(self, request: CaptureRequest, at: float) -> None:
        """Uncount a capture that was started ``at`` and recorded nothing."""
        begun = self._baselines if request.trigger in REGULAR_TRIGGERS else self._automatic
        this = _Begun(at, request.owner)
        if request.trigger != "manual" and this in begun:
            begun.remove(this)
            self._last.pop(_key(request), None)

    def _check_quiet_hours(self) -> None:
        span = quiet(self.config.quiet_hours, self._wall())
        if span is not None:
            raise Refused("refused_quiet_hours", f"triggers.quiet_hours has {span}")

    def _check_cooldown(self, request: CaptureRequest, at: float) -> None:
        last, anomaly_id = self._last.get(_key(request), (-DAY_S, None))
        if anomaly_id is not None and anomaly_id == request.anomaly_id:
            # It was interrupted: the same is tried again.
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
        request: CaptureRequest, begun: Collection[_Begun], at: float, span: str, allowed: int
    ) -> None:
        """Check a budget of ``allowed`` captures per ``span``, a key of SPANS_S. Raises Refused.

        The budget is the node's, but each owner is allowed an equal part of it.
        """
        taken = Counter(one.owner for one in begun if at - one.at < SPANS_S[span])
        total, own = taken.total(), taken[request.owner]
        part = max(min(1, allowed), allowed // len(taken.keys() | {request.owner}))
        if total >= allowed and own >= part:
            limit = f"triggers.captures_per_{span} is {allowed}"
            if request.trigger in REGULAR_TRIGGERS:
                limit = f"{allowed} baselines and scheduled ones are allowed"
            raise Refused("refused_budget", f"{total} captures in the last {span}; {limit}")

    def _check_disk(self) -> None:
        room = self._disk.room()
        wanted = max(2 * EXPECTED_BYTES, int(MIN_FREE_SHARE * room.total))
        if room.free < wanted:
            raise Refused(
                "refused_disk",
                f"{room.free >> 20} MiB free in {self._disk.path}, {wanted >> 20} MiB are needed; "
                "free some or set store.url",
            )

    def _forget(self, at: float) -> None:
        for begun in (self._automatic, self._baselines):
            while begun and at - begun[0].at >= DAY_S:
                begun.popleft()
        horizon = at - max(self.config.cooldown_s, HOUR_S)
        self._last = {key: last for key, last in self._last.items() if last[0] >= horizon}


def _key(request: CaptureRequest) -> tuple[JobId, str]:
    return (request.job_id, request.anomaly_kind or request.kind)


# Alertmanager sends a firing alert again for hours, and again within seconds where it is refused.
ALERT_REPEAT_S = 60.0
MAX_REMEMBERED = 1000


class Refusals:
    """Counts refusals: a user's each time, an anomaly's if its reason changes.

    An alert's, by job and kind, also counts once per ALERT_REPEAT_S. ``at`` is monotonic.
    """

    def __init__(self) -> None:
        # The last reason, and when it was counted.
        self._last: NewestMap[tuple[str, ...], tuple[str, float]] = NewestMap(MAX_REMEMBERED)

    def is_new(self, request: CaptureRequest, reason: str, at: float) -> bool:
        """Return whether to count this refusal, and remember it."""
        key = _asker(request)
        if key is None:
            return True
        last, counted_at = self._last.get(key, ("", at))
        lasts = request.trigger == "anomaly" or at - counted_at < ALERT_REPEAT_S
        is_known = reason == last and lasts
        self._last[key] = (reason, counted_at if is_known else at)
        return not is_known

    def forget(self, request: CaptureRequest) -> None:
        """Count the next refusal: a capture has succeeded."""
        key = _asker(request)
        if key is not None:
            self._last.pop(key, None)


def _asker(request: CaptureRequest) -> tuple[str, ...] | None:
    if request.anomaly_id is not None:
        return (request.anomaly_id,)
    if request.trigger == "alert":
        return (*request.job_id, request.anomaly_kind or request.kind)
    return None


# Some rounds of the loop that measures it (agent.capturing): the file system hangs.
MAX_AGE_S = 60.0


class DiskSpace(NamedTuple):
    """In bytes."""

    total: int
    free: int


class Disk:
    """``measure`` waits for the file system and has a loop of its own; ``room`` touches no file."""

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

    def room(self) -> DiskSpace:
        """Return the last measurement. Raises Refused if it failed or is too old."""
        at, found = self._measured
        age_s = self._monotonic() - at
        if isinstance(found, str):
            raise Refused("refused_disk", f"{self.path}: {found}")
        if age_s > MAX_AGE_S:
            raise Refused("refused_disk", f"{self.path} has not answered for {age_s:.0f} s")
        return found
