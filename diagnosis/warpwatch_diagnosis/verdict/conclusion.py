"""Draws the conclusion from the measures of a capture: the diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from warpwatch_diagnosis.comparison.alignment import Alignment, align
from warpwatch_diagnosis.comparison.before_after import BaselineComparison, compare_captures
from warpwatch_diagnosis.measures.intervals import Intervals
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.measures.measures_json import trace_json
from warpwatch_diagnosis.rules.base import Confidence, Finding, percent
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
# The verdicts that are not a problem: a server without requests waits for work.
NO_PROBLEM = frozenset({HEALTHY, "waiting_for_work"})
INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of one capture; its findings are sorted by recoverable time.

    alignment: None unless there are several ranks with GPUs whose collectives match. comparison:
    with the baseline, rank by rank. decides: the end of an inconclusive summary, a capture to take.
    """

    measures: tuple[Measures, ...]
    findings: tuple[Finding, ...]
    verdict: str
    summary: str
    alignment: Alignment | None = None
    comparison: tuple[BaselineComparison, ...] = ()
    decides: str = ""

    def clock_offset_us(self, measures: Measures) -> float | None:
        """Return the lead of the rank's clock over the first one's; None if unknown."""
        found = self._aligned(measures)
        return found[0].offsets_us[found[1]] if found else None

    def waits_for_ranks(self, measures: Measures) -> Intervals:
        """Return when the rank was in collectives that others had not reached, if known."""
        found = self._aligned(measures)
        return found[0].waits(found[1], measures.window) if found else []

    def _aligned(self, measures: Measures) -> tuple[Alignment, int] | None:
        """Return the alignment, which has the ranks with enough events, and this one's index."""
        enough = [id(m) for m in self.measures if m.shortage is None]
        if self.alignment is None or id(measures) not in enough:
            return None
        return self.alignment, enough.index(id(measures))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of schema 1, described in docs/diagnosis.md."""
        return {
            "schema": SCHEMA,
            "traces": [trace_json(m) for m in self.measures],
            "findings": [f.to_json() for f in self.findings],
            "verdict": self.verdict,
            "summary": self.summary,
            "collectives": self.alignment.to_json() if self.alignment else None,
            "comparison": [c.to_json() for c in self.comparison],
        }


def _less_sure(finding: Finding, brief: str) -> Finding:
    """Lower the confidence of a finding from a single step, which may be an odd one."""
    lower: dict[Confidence, Confidence] = {"high": "medium", "medium": "low", "low": "low"}
    evidence = (*finding.evidence, brief)
    return replace(finding, confidence=lower[finding.confidence], evidence=evidence)


def conclude(
    capture: Sequence[Measures],
    baseline: Sequence[Measures] = (),
    missing: Mapping[int, str] | None = None,
    asked: Asked | None = None,
) -> Diagnosis:
    """Conclude from the ranks of one capture; ``missing``: ranks without a trace, and why.

    ``asked``: the anomaly that the capture is of.
    """
    enough = [m for m in capture if m.shortage is None]
    well = [m for m in baseline if m.shortage is None and m.brevity is None]
    alignment, comparison = align(enough), compare_captures(enough, well)
    reasons = waits_for_missing(enough, missing or {})
    brief = next((m.brevity for m in enough if m.brevity), None)
    findings = find(enough, alignment, well, asked)
    if reasons:
        # Communication may be waiting for a missing rank.
        kind = CommunicationBoundRule.kind
        findings = [replace(f, confidence="low") if f.kind == kind else f for f in findings]
    reasons += ["; ".join(c.sentences[:1] + c.sentences[-1:]) for c in comparison if c.is_slower]
    first, decides = _head(findings, enough, sure_only=bool(reasons)), ""
    if brief:
        findings = [_less_sure(finding, brief) for finding in findings]
    if first is not None:
        verdict, summary = first.kind, first.evidence[0]
        if len(capture) > 1 and first.label not in summary:
            summary = f"{first.label}: {summary}"
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
        short = next((why for m in baseline if (why := m.shortage or m.brevity)), None)
        reason = short or (
            "only one of the two has GPU events, or annotated steps, or their work differs"
        )
        summary += f"; the baseline cannot be compared: {reason}"
    return Diagnosis(
        tuple(capture), tuple(findings), verdict, summary, alignment, comparison, decides
    )


def _head(findings: list[Finding], enough: Sequence[Measures], sure_only: bool) -> Finding | None:
    """Return the finding that gives the verdict, or None.

    It is the first sure one, or the place of the host if more of the time is unexplained.
    """
    sure = [f for f in findings if f.confidence != "low"]
    if unexplained_share(enough) > max([MAX_UNEXPLAINED_SHARE, *(f.share for f in sure)]):
        found = sorted(unexplained(enough), key=lambda f: -f.recoverable_s)
        findings[:0] = found
        return next(iter(found), None)
    if sure or findings or sure_only:
        return next(iter(sure or ([] if sure_only else findings)), None)
    findings += mostly(enough)
    return next(iter(findings), None)


def _well(measures: Sequence[Measures]) -> str:
    if not measures:
        return "there is no trace"
    if all(m.gpu is not None for m in measures):
        busy = min(m.share(m.gpu.busy) for m in measures if m.gpu)
        return f"the GPU is busy for {percent(busy)} of the step and nothing stands out"
    busy = min(m.share(m.cpu.operators) for m in measures if m.cpu)
    return f"operators run for {percent(busy)} of the step and nothing stands out"
