"""Provides findings, the base classes of the rules that make them, and the wording of evidence."""

from __future__ import annotations

import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from warpwatch_diagnosis.alignment import Alignment
from warpwatch_diagnosis.intervals import Intervals, difference, total, union
from warpwatch_diagnosis.measures.host_events import Cause
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.words import milliseconds, short

Confidence = Literal["high", "medium", "low"]
# The traces of a capture's ranks.
Capture = Sequence[Measures]
# The replay must save this part of the time that seems lost if the fault is the cause.
MIN_SAVED = 0.5

_ADVICE = tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))


def advice(kind: str, variant: str = "", **values: object) -> str:
    """Return the advice of a kind of finding; ``values`` fill its placeholders."""
    text: str = _ADVICE[kind][variant] if variant else _ADVICE[kind]
    return text.format(**values)


@dataclass(frozen=True, slots=True)
class Finding:
    """One bottleneck.

    share: its part of the step window. recoverable_s: seconds of the window that its removal saves.
    evidence: sentences with names, counts and times; the first one is the summary. yields_to: kinds
    that name the same fault more exactly; found for the same rank, they replace this one.
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
        return finding_json(
            self.kind, self.rank, self.node, self.confidence, self.evidence, self.advice,
            round(self.share, 4), round(self.recoverable_s, 6),
        )  # fmt: skip


def finding_json(
    kind: str,
    rank: int | None,
    node: str | None,
    confidence: Confidence,
    evidence: Sequence[str],
    advice: str,
    share: float | None = None,
    recoverable_s: float | None = None,
) -> dict[str, Any]:
    """Return an entry of ``findings``; stacks and files of memory show no share of time."""
    return {
        "kind": kind,
        "rank": rank,
        **({"node": node} if node else {}),
        "share": share,
        "recoverable_s": recoverable_s,
        "confidence": confidence,
        "evidence": list(evidence),
        "advice": advice,
    }


class DiagnosisRule(ABC):
    """Finds one kind of fault, and replaces the kinds that it ``supersedes`` for that rank."""

    kind: str
    supersedes: tuple[str, ...] = ()

    @abstractmethod
    def find(self, capture: Capture, alignment: Alignment | None) -> list[Finding]:
        """Return the findings in traces that all hold enough for a conclusion."""

    def usual_shares(self, baseline: Capture, alignment: Alignment | None) -> list[float]:
        """Return the share of each rank of a baseline; empty if it cannot be compared.

        ``alignment`` is that of the capture which is compared with the baseline.
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
        of_servers = _ADVICE["server"].get(self.kind)
        if measures.server is not None and of_servers:
            advice = of_servers.format(label=measures.label)
        for of_nvidia, of_amd in _ADVICE["amd"].items() if measures.is_amd else ():
            advice = advice.replace(of_nvidia, of_amd)
        return Finding(
            self.kind, measures.rank, measures.label, share, recoverable_us / 1e6,
            confidence, tuple(evidence), advice, yields_to, measures.node,
        )  # fmt: skip


class RankRule(DiagnosisRule):
    """Finds a fault that each rank has by itself: time that it loses.

    min_share, high_share: the lost share of the window for a finding, and for confidence "high".
    """

    min_share = 0.0
    high_share = 0.0
    needs_gpu = False

    @abstractmethod
    def lost(self, measures: Measures) -> Intervals:
        """Return the time lost to the fault; empty without the fault."""

    @abstractmethod
    def evidence(self, measures: Measures, lost: Intervals) -> Iterable[str]: ...

    def advice(self, measures: Measures) -> str:
        return advice(self.kind)

    def share(self, measures: Measures, lost: Intervals) -> float:
        """Return the share that is reported, and compared with a baseline."""
        return measures.share(lost)

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        """Return whether there is a finding; ``several``: other ranks may wait for this one."""
        return measures.share(lost) > self.min_share

    def recoverable_us(self, measures: Measures, lost: Intervals) -> float:
        """Return the saving of the replay if known; on the CPU the time outside collectives."""
        if measures.gpu is None:
            return total(difference(lost, measures.host.collectives.intervals))
        return measures.savings.get(self.kind, total(lost))

    def confidence(self, measures: Measures, lost: Intervals, recoverable_us: float) -> Confidence:
        """Return "low" if much less can be saved than seems lost: it may have another cause."""
        saved = measures.share_of_us(recoverable_us)
        if saved < self.min_share and recoverable_us < MIN_SAVED * total(lost):
            return "low"
        return "high" if saved > self.high_share and self.is_sure(measures, lost) else "medium"

    def is_sure(self, measures: Measures, lost: Intervals) -> bool:
        return measures.share(lost) > self.high_share

    def find(self, capture: Capture, alignment: Alignment | None) -> list[Finding]:
        found = []
        for measures in capture:
            lost = self.lost(measures)
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

    def usual_shares(self, baseline: Capture, alignment: Alignment | None) -> list[float]:
        known = [m for m in baseline if m.gpu is not None or not self.needs_gpu]
        return [self.share(m, self.lost(m)) for m in known]


def idle(measures: Measures, *causes: Cause) -> Intervals:
    """Return the device's idle time with one of the causes; empty without a device."""
    if measures.gpu is None:
        return []
    spent = measures.gpu.idle_time
    return union(gap for cause in causes for gap in spent.of(cause))


def worst_gaps(measures: Measures, cause: Cause) -> tuple[str, ...]:
    """Return a clause on the longest gaps of the cause and the work that they delayed, if any."""
    gaps = measures.gpu.idle_time.worst.get(cause, ()) if measures.gpu else ()
    shown = [
        milliseconds(gap.end_us - gap.begin_us)
        + (f" before {short(gap.before)}" if gap.before else "")
        for gap in gaps
    ]
    return (f"the longest gaps took {', '.join(shown)}",) if shown else ()


def in_lines(measures: Measures, part: str) -> tuple[str, ...]:
    """Return a clause on the lines of the user's code in a part of ``Measures.lines``, if any."""
    named = [f"{line.place} {milliseconds(line.us)}" for line in measures.lines.get(part, ())]
    return (f"lines that take it: {', '.join(named)}",) if named else ()
