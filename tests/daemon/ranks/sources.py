"""The ranks source of a daemon that has just started, without the daemon's loops."""

from __future__ import annotations

from collections.abc import Callable

from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.pods import KnownPods
from warpwatch_daemon.ranks.saved import Positions
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_daemon.ranks.table import LIMITS, Limits


def ranks_source(
    folder: RendezvousFolder,
    reject: Callable[[str], None] = lambda reason: None,
    limits: Limits = LIMITS,
    known_pods: KnownPods | None = None,
) -> RanksSource:
    """It looks for rings at each poll; positions are on disk, beside the folder, at once."""
    positions = Positions(folder.path.parent, wake=lambda: positions.write())
    return RanksSource(folder, positions, 10.0, reject, 0, limits, known_pods)
