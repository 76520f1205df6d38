"""The files of a capture that its diagnosis reads, and the ranks without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from warpwatch_capturing.children.verification import UNREADABLE
from warpwatch_diagnosis.trace.files import reduction_name
from warpwatch_telemetry.captures import Capture, RankCapture

# The names of a baseline's reductions begin so, in a multi-node capture.
BASELINE = "baseline."


def is_usable(rank: RankCapture) -> bool:
    """Return whether the rank brought a file that can be read."""
    unreadable = any(problem.startswith(UNREADABLE) for problem in rank.problems)
    return rank.state == "written" and not unreadable


def unread(rank: RankCapture, why: str) -> RankCapture:
    """Return a rank whose file is there, but cannot be read."""
    problems = (*rank.problems, f"{UNREADABLE}: {why}")
    return replace(rank, detail=why, problems=problems, verified=False)


def files(ranks: Sequence[RankCapture]) -> list[str]:
    """Return the main files of ranks that can be read."""
    return [rank.file for rank in ranks if rank.file and is_usable(rank)]


def nodes(ranks: Sequence[RankCapture]) -> dict[int, str]:
    """Return the node of each rank of a multi-node capture."""
    return {rank.rank: rank.node for rank in ranks if rank.node}


def reductions(capture: Capture) -> list[str]:
    """Return the files that the diagnosis of a multi-node capture reads."""
    wanted = map(reduction_name, files(capture.ranks))
    return [name for name in wanted if name in capture.files]


def verified_files(ranks: Sequence[RankCapture]) -> list[str]:
    """Return the traces that other captures are compared with."""
    return [rank.file for rank in ranks if rank.file and rank.verified]


def missing(ranks: Sequence[RankCapture]) -> dict[int, str]:
    """Return why ranks have no file, by rank."""
    return {rank.rank: rank.detail for rank in ranks if not is_usable(rank)}
