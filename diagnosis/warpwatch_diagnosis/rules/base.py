"""What a rule is: it looks at the measures of one capture and answers findings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from warpwatch_diagnosis.comparison.alignment import Alignment
from warpwatch_diagnosis.measures.host_events import Cause
from warpwatch_diagnosis.measures.intervals import Intervals, difference, total, union
from warpwatch_diagnosis.measures.measures import Measures

Confidence = Literal["high", "medium", "low"]
# Of what seems lost, what the replay without the fault must save for the fault to be the cause.
MIN_SAVED = 0.5


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
    node: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "rank": self.rank,
            **({"node": self.node} if self.node else {}),
            "share": round(self.share, 4),
            "recoverable_s": round(self.recoverable_s, 6),
            "confidence": self.confidence,
            "evidence": list(self.evidence),
            "advice": self.advice,
        }


class DiagnosisRule(ABC):
    """``supersedes``: kinds that see the same time less exactly; they are dropped for that rank."""

    kind: str
    supersedes: tuple[str, ...] = ()

    @abstractmethod
    def find(self, capture: Sequence[Measures], alignment: Alignment | None) -> list[Finding]:
        """Findings in the traces of one capture, which all hold enough to be judged."""

    def usual_shares(
        self, baseline: Sequence[Measures], alignment: Alignment | None
    ) -> list[float]:
        """What the rule judges, for each rank of a baseline; empty where it cannot be compared.

        ``alignment``: of the capture that is compared with it.
        """
        return []

    def finding(
        self,
        measures: Measures,
        share: float,
        recoverable_us: float,
        confidence: Confidence,
        evidence: Iterable[str],
        advice: str,
        yields_to: tuple[str, ...] = (),
    ) -> Finding:
        return Finding(
            self.kind, measures.rank, measures.label, share, recoverable_us / 1e6,
            confidence, tuple(evidence), advice, yields_to,
            measures.node,
        )  # fmt: skip


class RankRule(DiagnosisRule):
    """A fault that each rank has by itself: time that it loses.

    min_share, high_share: of the window that is lost, for a finding and for confidence "high".
    """

    min_share = 0.0
    high_share = 0.0
    needs_gpu = False

    @abstractmethod
    def lost(self, measures: Measures) -> Intervals:
        """What the fault costs; nothing where there is none."""

    @abstractmethod
    def evidence(self, measures: Measures, lost: Intervals) -> Iterable[str]: ...

    @abstractmethod
    def advice(self, measures: Measures) -> str: ...

    def share(self, measures: Measures, lost: Intervals) -> float:
        """What is reported, and compared with a baseline."""
        return measures.share(lost)

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        """``several``: whether other ranks may have to wait for this one."""
        return measures.share(lost) > self.min_share

    def recoverable_us(self, measures: Measures, lost: Intervals) -> float:
        """What the replay saves, where it is known; on the CPU what no collective hides."""
        if measures.gpu is None:
            return total(difference(lost, measures.host.collectives.intervals))
        return measures.savings.get(self.kind, total(lost))

    def confidence(self, measures: Measures, lost: Intervals, recoverable_us: float) -> Confidence:
        """Follows what can be won back: much less than what seems lost may have another cause."""
        saved = measures.share_of_us(recoverable_us)
        if saved < self.min_share and recoverable_us < MIN_SAVED * total(lost):
            return "low"
        return "high" if saved > self.high_share and self.is_sure(measures, lost) else "medium"

    def is_sure(self, measures: Measures, lost: Intervals) -> bool:
        return measures.share(lost) > self.high_share

    def find(self, capture: Sequence[Measures], alignment: Alignment | None) -> list[Finding]:
        found = []
        for measures in capture:
            lost = [] if self.needs_gpu and measures.gpu is None else self.lost(measures)
            if lost and self.applies(measures, lost, several=len(capture) > 1):
                found.append(self.finding_of(measures, lost))
        return found

    def finding_of(self, measures: Measures, lost: Intervals) -> Finding:
        recoverable_us = self.recoverable_us(measures, lost)
        return self.finding(
            measures,
            share=self.share(measures, lost),
            recoverable_us=recoverable_us,
            confidence=self.confidence(measures, lost, recoverable_us),
            evidence=self.evidence(measures, lost),
            advice=self.advice(measures),
        )

    def usual_shares(
        self, baseline: Sequence[Measures], alignment: Alignment | None
    ) -> list[float]:
        known = [m for m in baseline if m.gpu is not None or not self.needs_gpu]
        return [self.share(m, self.lost(m)) for m in known]


def idle(measures: Measures, *causes: Cause) -> Intervals:
    """The device's idle time that has one of the causes; nothing without a device."""
    if measures.gpu is None:
        return []
    by_cause = measures.gpu.idle_time.by_cause
    return union(gap for cause in causes for gap in by_cause[cause])


def worst_gaps(measures: Measures, cause: Cause) -> tuple[str, ...]:
    """The longest idle gaps of the cause and what they held up, at most one clause."""
    gaps = measures.gpu.idle_time.worst.get(cause, ()) if measures.gpu else ()
    shown = [
        milliseconds(gap.end_us - gap.begin_us)
        + (f" before {short(gap.before)}" if gap.before else "")
        for gap in gaps
    ]
    return (f"the longest gaps took {', '.join(shown)}",) if shown else ()


def in_lines(measures: Measures, part: str) -> tuple[str, ...]:
    """Where in the user's code a part of the step was spent, at most one clause; see Measures."""
    named = [f"{line.place} {milliseconds(line.us)}" for line in measures.lines.get(part, ())]
    return (f"lines that take it: {', '.join(named)}",) if named else ()


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
