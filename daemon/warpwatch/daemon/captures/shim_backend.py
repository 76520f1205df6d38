"""Whom the shim can capture: the ranks that have a ring."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from warpwatch.daemon.captures.policy import Policy
from warpwatch.daemon.captures.shim import ShimSession, Target
from warpwatch.daemon.errors import Refused
from warpwatch.daemon.rendezvous.commands import CommandFiles
from warpwatch.daemon.rendezvous.folder import RendezvousFolder
from warpwatch.daemon.sources.ranks import RanksSource
from warpwatch.telemetry.captures import CAPTURE_KINDS, Capture, CaptureKind

logger = logging.getLogger(__name__)


class ShimBackend:
    """A ``captures.session.Backend``."""

    name = "shim"
    kinds: frozenset[CaptureKind] = frozenset(CAPTURE_KINDS)

    def __init__(self, policy: Policy, folder: RendezvousFolder, ranks: RanksSource) -> None:
        self._policy = policy
        self._inbox = folder.inbox
        self._commands = CommandFiles(folder.commands)
        self._ranks = ranks

    def jobs(self) -> Collection[str]:
        return self._ranks.jobs()

    def ranks(self, job: str) -> Mapping[int, int]:
        live = self._ranks.targets(job)
        return {number: rank.claims.world_size for number, rank in live.items() if rank.ring}

    def events_per_step(self, job: str) -> int | None:
        said = (rank.claims.events_per_step for rank in self._ranks.targets(job).values())
        return max((events for events in said if events), default=None)

    def begin(self, capture: Capture, numbers: Sequence[int], at: float) -> ShimSession:
        live = self._ranks.targets(capture.request.job)
        targets = {
            number: Target(rank, rank.ring.name, rank.owner_uid)
            for number, rank in sorted(live.items())
            if rank.ring is not None and number in numbers
        }
        if not targets:
            raise Refused("refused_no_rank", f"every rank of {capture.request.job} has just ended")
        begun = self._ranks.step_begun
        return ShimSession(
            capture, numbers, targets, self._policy.config, self._send, begun, self._inbox, at
        )

    def _send(self, target: Target, command: dict[str, Any]) -> None:
        try:
            self._commands.send(target.ring_name, command)
        except OSError as error:
            # The rank then does not answer and is reported missing.
            logger.warning("cannot send to %s: %s", target.ring_name, error)
