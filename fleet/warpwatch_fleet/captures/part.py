"""What one node does of a capture over nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

from warpwatch_fleet.targets import Target
from warpwatch_telemetry.captures import RANK_ENDS, Capture, CaptureRequest, RankCapture
from warpwatch_telemetry.jobs import JobId

MAX_DETAIL = 300
_ARMED = frozenset({"armed", "recording", "exported", "written"})


@dataclass(slots=True)
class Part:
    """``job``: as this node calls it. ranks: those that are to be captured there.

    lost: why it takes no part, or none any more. said: its capture, as far as it has told.
    silent_since: monotonic; since when nothing is heard of it.
    """

    node: str
    target: Target
    job: JobId
    ranks: tuple[int, ...]
    lost: str = ""
    said: Capture | None = None
    silent_since: float | None = None

    @property
    def is_over(self) -> bool:
        return bool(self.lost) or (self.said is not None and self.said.outcome is not None)

    def body(self, request: CaptureRequest, **more: Any) -> dict[str, Any]:
        """What this node is asked."""
        return {
            **self.job.fields(),
            "kind": request.kind,
            "ranks": list(self.ranks),
            "steps": request.steps,
            "options": list(request.options),
            "reason": request.reason[:500],
            "anomaly_id": request.anomaly_id,
            "anomaly_kind": request.anomaly_kind,
            "anomaly_seen": request.anomaly_seen and asdict(request.anomaly_seen),
            "alerts": list(request.alerts),
            "scheduled": request.trigger == "schedule",
            **more,
        }

    def states(self) -> list[RankCapture]:
        """Its ranks, in the words of its agent as far as they can be believed."""
        said = {rank.rank: rank for rank in self.said.ranks} if self.said else {}
        return [self._state(said.get(number, RankCapture(number))) for number in self.ranks]

    def _state(self, rank: RankCapture) -> RankCapture:
        rank = replace(rank, node=self.node, detail=rank.detail[:MAX_DETAIL])
        if self.lost and rank.state not in RANK_ENDS:
            return replace(rank, state="missing", detail=self.lost)
        return rank

    def shortcoming(self) -> str:
        """Why it is not complete, with its name; empty where it is."""
        if self.lost:
            return f"{self.node}: {self.lost}"
        if self.said is None or self.said.outcome in (None, "complete"):
            return ""
        return f"{self.node}: {self.said.detail[:MAX_DETAIL] or self.said.outcome}"


def are_armed(parts: Iterable[Part]) -> bool | None:
    """Whether all ranks know the start step; None: some have not answered yet."""
    states = {rank.state for part in parts for rank in part.states() if not part.lost}
    if states <= _ARMED:
        return True
    return None if states <= _ARMED | {"asked"} else False


def outcome_of(parts: Iterable[Part]) -> str:
    """Of captures.OUTCOMES."""
    return _together({"" if part.lost or not part.said else part.said.outcome for part in parts})


def _together(outcomes: set[str | None]) -> str:
    if outcomes == {"complete"}:
        return "complete"
    return "partial" if outcomes & {"complete", "partial"} else "failed"


def joined(captures: Sequence[Capture]) -> Capture:
    """What several nodes say of one capture, where the fleet no longer knows how it was begun."""
    first, *others = captures
    if not others:
        return first
    outcomes = {one.outcome for one in captures}
    ranks = sorted((rank for one in captures for rank in one.ranks), key=attrgetter("rank"))
    return replace(
        first,
        ranks=tuple(ranks),
        outcome=None if None in outcomes else _together(outcomes),
        detail="; ".join(filter(None, (one.detail for one in captures))),
        files=tuple(dict.fromkeys(name for one in captures for name in one.files)),
        diagnosis=None,
        cost_s=None,
        residual=None,
        step_s={},
    )
