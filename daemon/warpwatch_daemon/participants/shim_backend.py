"""Whom the shim can capture: the ranks that have a ring."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from warpwatch_capturing.policy import Policy
from warpwatch_capturing.session import Pace, fastest, median_step_s
from warpwatch_daemon.participants.shim import AskedRank, ShimSession
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_runtime.quantities import no_step
from warpwatch_telemetry.captures import STEP_KINDS, Capture
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId

logger = logging.getLogger(__name__)


class ShimBackend:
    """A ``captures.session.CaptureBackend``."""

    def __init__(
        self,
        policy: Policy,
        ranks: RanksSource,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._ranks = ranks
        self._monotonic = monotonic

    def jobs(self) -> Collection[JobId]:
        return self._ranks.jobs()

    def ranks(self, job: JobId) -> Mapping[int, int]:
        live = self._ranks.targets(job)
        return {number: rank.claims.world_size for number, rank in live.items() if rank.ring}

    def events_per_step(self, job: JobId) -> int | None:
        ranks = self._ranks.targets(job).values()
        return max((rank.claims.events_per_step for rank in ranks), default=0) or None

    def pace(self, job: JobId, numbers: Collection[int]) -> Pace:
        live = self._ranks.targets(job)
        ranks = [live[number] for number in numbers if number in live]
        begun = fastest([self._ranks.step_begun(rank) or 0 for rank in ranks] or [0])
        return Pace(begun, median_step_s(ranks, min))

    def begin(self, capture: Capture, numbers: Sequence[int], at: float) -> ShimSession:
        live = self._ranks.targets(capture.request.job_id)
        targets: dict[int, AskedRank] = {}
        for number in sorted(live.keys() & set(numbers)):
            calls = live[number].calls_without_step
            if calls and capture.request.kind in STEP_KINDS:
                raise Refused("refused_no_step", f"rank {number}: {no_step(calls)}")
            found = self._ranks.open_ring(live[number])
            if found is not None:
                ring, folder = found
                self._policy.check_owners([ring.payer])
                targets[number] = AskedRank(live[number], ring.name, ring.owner_uid, folder)
        if not targets:
            raise Refused("refused_no_rank", f"every rank of {capture.request.job} has just ended")
        begun = self._ranks.step_begun
        config, monotonic = self._policy.config, self._monotonic
        return ShimSession(capture, numbers, targets, config, _send, begun, at, monotonic)


def _send(target: AskedRank, command: dict[str, Any]) -> None:
    try:
        target.folder.commands.send(target.ring_name, command)
    except OSError as error:
        # The rank then does not answer and is reported missing.
        logger.warning("cannot send to %s: %s", target.ring_name, error)
