"""Which files of a capture its diagnosis reads, and which ranks it has to do without."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_capturing.children.verification import UNREADABLE
from warpwatch_diagnosis.trace.files import reduction_name
from warpwatch_telemetry.captures import Capture, RankCapture

# How the names of reductions begin that a capture over nodes was compared with.
BASELINE = "baseline."


def is_usable(rank: RankCapture) -> bool:
    """Whether there is something of the rank that can be read."""
    unreadable = any(problem.startswith(UNREADABLE) for problem in rank.problems)
    return rank.state == "written" and not unreadable


def files(ranks: Sequence[RankCapture]) -> list[str]:
    return [rank.file for rank in ranks if rank.file and is_usable(rank)]


def nodes(ranks: Sequence[RankCapture]) -> dict[int, str]:
    """Of a capture over nodes: where its ranks ran."""
    return {rank.rank: rank.node for rank in ranks if rank.node}


def reductions(capture: Capture) -> list[str]:
    """Of a capture over nodes: what was read of its ranks."""
    wanted = map(reduction_name, files(capture.ranks))
    return [name for name in wanted if name in capture.files]


def verified_files(ranks: Sequence[RankCapture]) -> list[str]:
    """Of a capture that others are compared with."""
    return [rank.file for rank in ranks if rank.file and rank.verified]


def missing(ranks: Sequence[RankCapture]) -> dict[int, str]:
    """The ranks without a file, and why."""
    return {rank.rank: rank.detail for rank in ranks if not is_usable(rank)}
