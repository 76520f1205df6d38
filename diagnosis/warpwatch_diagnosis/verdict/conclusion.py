"""The measures of a capture become a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from warpwatch_diagnosis.comparison.alignment import Alignment, align
from warpwatch_diagnosis.comparison.before_after import BaselineComparison, compare_captures
from warpwatch_diagnosis.measures.intervals import Intervals
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.measures.measures_json import trace_json
from warpwatch_diagnosis.rules.base import Finding, percent
from warpwatch_diagnosis.rules.communication_bound import CommunicationBoundRule
from warpwatch_diagnosis.verdict.doubts import doubts, waits_for_missing
from warpwatch_diagnosis.verdict.findings import Asked, find
from warpwatch_diagnosis.verdict.likeliest import (
    MAX_UNEXPLAINED_SHARE,
    likeliest,
    mostly,
    unexplained,
    unexplained_share,
)

SCHEMA = 1
HEALTHY = "healthy"
INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the traces of one capture say. ``findings``: most recoverable time first.

    alignment: None unless there are several ranks with GPUs whose collectives match. comparison:
    with the baseline, rank by rank; empty without one. decides: the end of an inconclusive
    summary, what to record; empty without.
    """

    measures: tuple[Measures, ...]
    findings: tuple[Finding, ...]
    verdict: str
    summary: str
    alignment: Alignment | None = None
    comparison: tuple[BaselineComparison, ...] = ()
    decides: str = ""

    def clock_offset_us(self, measures: Measures) -> float | None:
        """What the rank's clock is ahead of the first one's; None if not known."""
        found = self._aligned(measures)
        return found[0].offsets_us[found[1]] if found else None

    def waits_for_ranks(self, measures: Measures) -> Intervals:
        """When the rank was in a collective that others had not reached; empty if not known."""
        found = self._aligned(measures)
        return found[0].waits(found[1], measures.window) if found else []

    def _aligned(self, measures: Measures) -> tuple[Alignment, int] | None:
        """The alignment, which has the ranks with enough in their traces, and this one's index."""
        enough = [id(m) for m in self.measures if m.shortage is None]
        if self.alignment is None or id(measures) not in enough:
            return None
        return self.alignment, enough.index(id(measures))

    def to_json(self) -> dict[str, Any]:
        """Schema 1, described in docs/diagnosis.md."""
        return {
            "schema": SCHEMA,
            "traces": [trace_json(m) for m in self.measures],
            "findings": [f.to_json() for f in self.findings],
            "verdict": self.verdict,
            "summary": self.summary,
            "collectives": self.alignment.to_json() if self.alignment else None,
            "comparison": [c.to_json() for c in self.comparison],
        }


def conclude(
    capture: Sequence[Measures],
    baseline: Sequence[Measures] = (),
    missing: Mapping[int, str] | None = None,
    asked: Asked | None = None,
) -> Diagnosis:
    """The verdict on the ranks of one capture; ``missing``: ranks without a trace, and why.

    ``asked``: the anomaly that the capture is of.
    """
    enough = [m for m in capture if m.shortage is None]
    well = [m for m in baseline if m.shortage is None and m.brevity is None]
    alignment, comparison = align(enough), compare_captures(enough, well)
    reasons = waits_for_missing(enough, missing or {})
    brief = next((m.brevity for m in enough if m.brevity), None)
    findings = find(enough, alignment, well, asked)
    if reasons:
        findings = [_unsure(f) for f in findings]
    reasons += ["; ".join(c.sentences[:1] + c.sentences[-1:]) for c in comparison if c.is_slower]
    first, decides = _heads(findings, enough, sure_only=bool(reasons)), ""
    if brief:
        findings = [_brief(f, brief) for f in findings]
    if first is not None:
        verdict, summary = first.kind, _first_sentence(first, several=len(capture) > 1)
        findings.sort(key=lambda f: f.kind != verdict)
    else:
        reasons += doubts(capture, enough, alignment)
        reasons += [f"{m.label}: {m.brevity}" for m in enough if m.brevity and not m.steps]
        if asked and not reasons:
            reasons = [f"the captured steps do not show {asked.what}"]
        verdict = INCONCLUSIVE if reasons or not enough else HEALTHY
        named, decides = likeliest(enough, findings) if reasons else ("", "")
        said = reasons[0] + named if reasons else _well(enough)
        summary = f"{said}; {decides}" if decides else said
        if brief and not reasons:
            summary += f"; {brief}: what comes seldom is not in it"
    if baseline and enough and not comparison:
        summary += f"; the baseline cannot be compared: {_useless(baseline)}"
    return Diagnosis(
        tuple(capture), tuple(findings), verdict, summary, alignment, comparison, decides
    )


def _heads(findings: list[Finding], enough: Sequence[Measures], sure_only: bool) -> Finding | None:
    """The first that is sure, unless more of the time is unexplained; then what the host was in."""
    sure = [f for f in findings if f.confidence != "low"]
    if unexplained_share(enough) > max([MAX_UNEXPLAINED_SHARE, *(f.share for f in sure)]):
        found = sorted(unexplained(enough), key=lambda f: -f.recoverable_s)
        findings[:0] = found
        return next(iter(found), None)
    if sure or findings or sure_only:
        return next(iter(sure or ([] if sure_only else findings)), None)
    findings += mostly(enough)
    return next(iter(findings), None)


def _brief(finding: Finding, brevity: str) -> Finding:
    """A single step may be an odd one."""
    lower: Literal["medium", "low"] = "medium" if finding.confidence == "high" else "low"
    return replace(finding, confidence=lower, evidence=(*finding.evidence, brevity))


def _unsure(finding: Finding) -> Finding:
    """What looks like communication may be the waiting for a rank that is missing."""
    communicates = finding.kind == CommunicationBoundRule.kind
    return replace(finding, confidence="low") if communicates else finding


def _first_sentence(finding: Finding, several: bool) -> str:
    where = f"{finding.label}: " if several and finding.label not in finding.evidence[0] else ""
    return where + finding.evidence[0]


def _useless(baseline: Sequence[Measures]) -> str:
    """Why a baseline cannot be compared with."""
    short = next((why for m in baseline if (why := m.shortage or m.brevity)), None)
    return short or "only one of the two has GPU events, or annotated steps"


def _well(measures: Sequence[Measures]) -> str:
    if not measures:
        return "there is no trace"
    if all(m.gpu is not None for m in measures):
        busy = min(m.share(m.gpu.busy) for m in measures if m.gpu)
        return f"the GPU is busy for {percent(busy)} of the step and nothing stands out"
    busy = min(m.share(m.cpu.operators) for m in measures if m.cpu)
    return f"operators run for {percent(busy)} of the step and nothing stands out"
