"""What the anomaly that asked for a capture had seen speaks for what its traces show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from warpwatch_diagnosis.rules.base import Confidence, Finding

# What a kind of anomaly is in a trace; a straggler may also be late for a reason with a name.
_SEEN_AS = {
    "data_stall": "data_loading",
    "comm_slow": "communication_bound",
    "gc_pause": "gc_pause",
}
_SURER: dict[Confidence, Confidence] = {"low": "medium", "medium": "high", "high": "high"}


@dataclass(frozen=True, slots=True)
class Asked:
    """The anomaly: its kind, rank, the step that it began at, and how much longer it took than
    usual (1.6: by 60 %); None where that is not known."""

    kind: str
    rank: int | None = None
    begin_step: int | None = None
    ratio: float | None = None

    @property
    def sentence(self) -> str:
        return f"the anomaly that asked saw it too: {self.what}"

    @property
    def what(self) -> str:
        of = "" if self.rank is None else f" of rank {self.rank}"
        since = "" if self.begin_step is None else f" since step {self.begin_step}"
        by = "" if self.ratio is None else f", {self.ratio:.2f} times as long as usual"
        return f"{self.kind.replace('_', ' ')}{of}{since}{by}"


def corroborated(findings: Iterable[Finding], asked: Asked | None) -> list[Finding]:
    """Two that saw the same, one in every step and one in a few, are surer than one; it is what
    was asked for, so it comes first."""
    if asked is None:
        return list(findings)
    ordered = sorted(findings, key=lambda f: not _is_same(f, asked))
    return [_surer(f, asked) if _is_same(f, asked) else f for f in ordered]


def _is_same(finding: Finding, asked: Asked) -> bool:
    same_rank = asked.rank is None or finding.rank == asked.rank
    if asked.kind == "straggler":
        return asked.rank is not None and same_rank
    return same_rank and _SEEN_AS.get(asked.kind) == finding.kind


def _surer(finding: Finding, asked: Asked) -> Finding:
    return replace(
        finding,
        confidence=_SURER[finding.confidence],
        evidence=(*finding.evidence, asked.sentence),
    )
