"""Diagnoses trace files: reads each one, measures it, concludes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from warpwatch_diagnosis.alignment import Alignment, align
from warpwatch_diagnosis.before_after import BaselineComparison, compare_captures
from warpwatch_diagnosis.findings import (
    MAX_UNEXPLAINED_SHARE,
    RequestingAnomaly,
    check_one_capture,
    doubts,
    find,
    find_slower,
    likeliest,
    mostly,
    unexplained,
    unexplained_share,
    waits_for_missing,
)
from warpwatch_diagnosis.measures.measures import Measures, measure, trace_json
from warpwatch_diagnosis.measures.reduction import read_reduction
from warpwatch_diagnosis.rules.base import Confidence, Finding
from warpwatch_diagnosis.rules.communication_bound import CommunicationBoundRule
from warpwatch_diagnosis.trace.files import REDUCTION, TraceSource
from warpwatch_diagnosis.trace.reader import read_trace, without_collection
from warpwatch_diagnosis.words import percent

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


def untimed_json(findings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON of schema 1 of findings without traces, the verdict first."""
    verdict, summary = findings[0]["kind"], findings[0]["evidence"][0]
    document = {"schema": SCHEMA, "traces": [], "findings": list(findings)}
    return document | {"verdict": verdict, "summary": summary}


def diagnose(
    paths: Sequence[TraceSource],
    baseline: Sequence[TraceSource] = (),
    missing: Mapping[int, str] | None = None,
    nodes: Mapping[int, str] | None = None,
    anomaly: RequestingAnomaly | None = None,
    reading: Callable[[int, int, str], None] = lambda number, count, name: None,
) -> Diagnosis:
    """Diagnose the ranks of one capture; ``baseline`` has traces of the same job when healthy.

    A trace may be its reduction. missing: ranks without a trace, and why. nodes: the nodes of
    ranks, to be named. anomaly: the anomaly that the capture is of. reading: receives the number of
    the file that is read next, their count, and its name. Raises TraceError for the first unusable
    file, and for files that are not ranks of one capture.
    """
    count = len(paths) + len(baseline)
    numbers = itertools.count()

    def read(files: Sequence[TraceSource]) -> list[Measures]:
        found = []
        for path in files:
            reading(next(numbers), count, path.name)
            # Only one trace is in memory.
            is_reduction = path.name.endswith(REDUCTION)
            found.append(read_reduction(path) if is_reduction else measure(read_trace(path)))
        return sorted(found, key=lambda m: (m.rank is None, m.rank or 0, m.file))

    where = nodes or {}
    with without_collection():
        ranks = read(paths)
        capture = [replace(m, node=None if m.rank is None else where.get(m.rank)) for m in ranks]
        check_one_capture(capture)
        well = read(baseline)
    reading(count, count, "")
    return conclude(capture, well, missing, anomaly)


def conclude(
    capture: Sequence[Measures],
    baseline: Sequence[Measures] = (),
    missing: Mapping[int, str] | None = None,
    anomaly: RequestingAnomaly | None = None,
) -> Diagnosis:
    """Conclude from the ranks of one capture; the arguments are those of ``diagnose``."""
    enough = [m for m in capture if m.shortage is None]
    well = [m for m in baseline if m.shortage is None and m.brevity is None]
    alignment, comparison = align(enough), compare_captures(enough, well)
    reasons = waits_for_missing(enough, missing or {})
    brief = next((m.brevity for m in enough if m.brevity), None)
    findings = find(enough, alignment, well, anomaly)
    if reasons:
        # Communication may be waiting for a missing rank.
        kind = CommunicationBoundRule.kind
        findings = [replace(f, confidence="low") if f.kind == kind else f for f in findings]
    slower = [c for c in comparison if c.is_slower]
    reasons += [c.summary for c in slower]
    first, decides = _head(findings, enough, sure_only=bool(reasons)), ""
    if first is None and (found := find_slower(enough, slower, anomaly)):
        first = found[0]
        findings += found
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
        if anomaly and not reasons:
            reasons = [f"the captured steps do not show {anomaly.what}"]
        verdict = INCONCLUSIVE if reasons or not enough else HEALTHY
        named, decides = likeliest(enough, findings) if reasons else ("", "")
        text = reasons[0] + named if reasons else _well(enough)
        summary = f"{text}; {decides}" if decides else text
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


def _less_sure(finding: Finding, brief: str) -> Finding:
    """Lower the confidence of a finding from a single step, which may be an odd one."""
    lower: dict[Confidence, Confidence] = {"high": "medium", "medium": "low", "low": "low"}
    evidence = (*finding.evidence, brief)
    return replace(finding, confidence=lower[finding.confidence], evidence=evidence)
