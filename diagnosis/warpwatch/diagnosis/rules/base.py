"""What a rule is: it looks at the measures of one capture and answers findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from warpwatch.diagnosis.measures import Measures

Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One bottleneck.

    share: of the step window, 0 to 1. recoverable_s: seconds of the window that would be won
    if it were gone. evidence: sentences with names, counts and times; the first one is the summary.
    """

    kind: str
    rank: int | None
    label: str
    share: float
    recoverable_s: float
    confidence: Confidence
    evidence: tuple[str, ...]
    advice: str

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "rank": self.rank,
            "share": round(self.share, 4),
            "recoverable_s": round(self.recoverable_s, 6),
            "confidence": self.confidence,
            "evidence": list(self.evidence),
            "advice": self.advice,
        }


class Rule(Protocol):
    """``supersedes``: kinds that see the same time less exactly; they are dropped for that rank."""

    kind: str
    supersedes: tuple[str, ...]

    def share(self, measures: Measures) -> float | None:
        """The share that the rule judges, to compare with a baseline; None: not comparable."""

    def find(self, capture: Sequence[Measures]) -> list[Finding]:
        """Findings in the traces of one capture, which all hold enough to be judged."""


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def milliseconds(us: float) -> str:
    return f"{us / 1e3:,.1f} ms"


def times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
