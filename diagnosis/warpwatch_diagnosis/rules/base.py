"""What a rule is: it looks at the measures of one capture and answers findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, Protocol

from warpwatch_diagnosis.measures.idle import Cause
from warpwatch_diagnosis.measures.intervals import Intervals, union
from warpwatch_diagnosis.measures.measures import Measures

Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One bottleneck.

    share: of the step window, 0 to 1. recoverable_s: seconds of the window that would be won
    if it were gone. evidence: sentences with names, counts and times; the first one is the summary.
    yields_to: kinds that name the same fault more exactly; found for the same rank, they replace
    this one.
    """

    kind: str
    rank: int | None
    label: str
    share: float
    recoverable_s: float
    confidence: Confidence
    evidence: tuple[str, ...]
    advice: str
    yields_to: tuple[str, ...] = ()

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


def once(compute: Callable[[Measures], Intervals]) -> Callable[[Measures], Intervals]:
    """Computes for each measures once what several rules ask for; nobody changes the answer."""

    @wraps(compute)
    def known(measures: Measures) -> Intervals:
        found = measures.derived.get(compute)
        if found is None:
            found = measures.derived[compute] = compute(measures)
        return found

    return known


def idle(measures: Measures, *causes: Cause) -> Intervals:
    """The device's idle time that has one of the causes; nothing without a device."""
    if measures.gpu is None:
        return []
    by_cause = measures.gpu.idle_time.by_cause
    return union(gap for cause in causes for gap in by_cause[cause])


def worst_gaps(measures: Measures, cause: Cause) -> str | None:
    """The longest idle gaps of the cause and what they held up, in a clause."""
    gaps = measures.gpu.idle_time.worst.get(cause, ()) if measures.gpu else ()
    if not gaps:
        return None
    shown = [
        milliseconds(gap.end_us - gap.begin_us)
        + (f" before {short(gap.before)}" * bool(gap.before))
        for gap in gaps
    ]
    return f"the longest gaps took {', '.join(shown)}"


def in_lines(measures: Measures, part: str) -> tuple[str, ...]:
    """Where in the user's code a part of the step was spent, at most one clause; see Measures."""
    found = measures.lines.get(part, ())
    if not found:
        return ()
    named = ", ".join(f"{line.place} {milliseconds(line.us)}" for line in found)
    return (f"lines that take it: {named}",)


def short(name: str | None, limit: int = 60) -> str:
    """A name from the trace, cut: templates of kernels grow to many kB."""
    name = name or ""
    return name if len(name) <= limit else name[: limit - 1] + "…"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def milliseconds(us: float) -> str:
    return f"{us / 1e3:,.1f} ms"


def times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
