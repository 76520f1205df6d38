"""May this be captured now? Every refusal has a reason that is counted."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Collection
from pathlib import Path

from warpwatch.daemon.config import TriggersConfig
from warpwatch.daemon.errors import Refused
from warpwatch.telemetry.captures import CaptureRequest

HOUR_S = 3600.0
# What a capture may bring; less than this must stay free in the store's file system, twice over.
EXPECTED_BYTES = 100 << 20
# And at least this share of it.
MIN_FREE_SHARE = 0.05


class Policy:
    """Cooldown and budget hold for automatic requests; everything else for everybody.

    ``at`` is monotonic.
    """

    def __init__(self, config: TriggersConfig, store: Path) -> None:
        self.config = config
        self._store = store
        self._automatic: deque[float] = deque()
        self._last: dict[tuple[str, str], float] = {}

    def check(self, request: CaptureRequest, busy: Collection[int], at: float) -> None:
        """Raises Refused. ``busy``: ranks of the job that are being captured."""
        if request.trigger != "manual":
            self._check_automatic(request, at)
        overlap = sorted(set(busy) if request.ranks is None else set(busy) & set(request.ranks))
        if overlap:
            ranks = ", ".join(map(str, overlap))
            raise Refused("refused_busy", f"rank {ranks} of {request.job} is being captured")
        self._check_disk()

    def begun(self, request: CaptureRequest, at: float) -> None:
        """An allowed capture was begun: it counts against budget and cooldown."""
        if request.trigger != "manual":
            self._automatic.append(at)
            self._last[self._key(request)] = at
            self._forget(at)

    def _check_automatic(self, request: CaptureRequest, at: float) -> None:
        self._forget(at)
        if self.config.dry_run:
            raise Refused("refused_dry_run", "triggers.dry_run is on")
        since_s = at - self._last.get(self._key(request), -HOUR_S * 24)
        if since_s < self.config.cooldown_s:
            rest_s = self.config.cooldown_s - since_s
            raise Refused(
                "refused_cooldown",
                f"{request.job} was captured for this {since_s:.0f} s ago; "
                f"triggers.cooldown_s leaves {rest_s:.0f} s",
            )
        if len(self._automatic) >= self.config.captures_per_hour:
            raise Refused(
                "refused_budget",
                f"{len(self._automatic)} captures in the last hour; "
                f"triggers.captures_per_hour is {self.config.captures_per_hour}",
            )

    def _check_disk(self) -> None:
        try:
            usage = shutil.disk_usage(self._store)
        except OSError as error:
            raise Refused("refused_disk", f"{self._store}: {error.strerror}") from error
        wanted = max(2 * EXPECTED_BYTES, int(MIN_FREE_SHARE * usage.total))
        if usage.free < wanted:
            raise Refused(
                "refused_disk",
                f"{usage.free >> 20} MiB free in {self._store}, {wanted >> 20} MiB are needed; "
                "free some or set store.url",
            )

    def _forget(self, at: float) -> None:
        while self._automatic and at - self._automatic[0] >= HOUR_S:
            self._automatic.popleft()
        horizon = at - max(self.config.cooldown_s, HOUR_S)
        self._last = {key: then for key, then in self._last.items() if then >= horizon}

    @staticmethod
    def _key(request: CaptureRequest) -> tuple[str, str]:
        return (request.job, request.anomaly_kind or request.kind)
