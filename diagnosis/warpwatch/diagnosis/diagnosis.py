"""Traces in, diagnosis out: reads the files, asks the rules, keeps one finding a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any

from warpwatch.diagnosis.intervals import difference
from warpwatch.diagnosis.measures import Measures, measure
from warpwatch.diagnosis.reader import read_trace
from warpwatch.diagnosis.rules import RULES
from warpwatch.diagnosis.rules.base import Finding, percent
from warpwatch.diagnosis.rules.communication_bound import exposed

SCHEMA = 1
HEALTHY = "healthy"
INCONCLUSIVE = "inconclusive"
# Idle time (TraceLens), exposed transfers (TraceLens) and uneven waiting that no rule explains are
# reasons not to say healthy.
MAX_IDLE_SHARE = 0.15
MAX_EXPOSED_TRANSFER_SHARE = 0.05
MAX_UNEVEN_WAIT_SHARE = 0.10
MAX_CPU_WAIT_SHARE = 0.25
# A share that rose by less than this against the baseline is as usual.
MIN_RISE = 0.02

PathOrText = str | PathLike[str]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the traces of one capture say. ``findings``: most recoverable time first."""

    measures: tuple[Measures, ...]
    findings: tuple[Finding, ...]
    verdict: str
    summary: str

    def to_json(self) -> dict[str, Any]:
        """Schema 1, described in docs/diagnosis.md."""
        return {
            "schema": SCHEMA,
            "traces": [m.to_json() for m in self.measures],
            "findings": [f.to_json() for f in self.findings],
            "verdict": self.verdict,
            "summary": self.summary,
        }


def diagnose(paths: Sequence[PathOrText], baseline: Sequence[PathOrText] = ()) -> Diagnosis:
    """Diagnose the ranks of one capture together; ``baseline``: traces of the same job when well.

    Raises TraceError for the first file that cannot be used.
    """
    capture = _measures(paths)
    return conclude(capture, _measures(baseline))


def conclude(capture: Sequence[Measures], baseline: Sequence[Measures] = ()) -> Diagnosis:
    """The pure part of ``diagnose``."""
    enough = [m for m in capture if m.shortage is None]
    found = [finding for rule in RULES for finding in rule.find(enough)]
    found = _against(_one_a_fault(found), [m for m in baseline if m.shortage is None])
    findings = tuple(sorted(found, key=lambda f: (f.confidence == "low", -f.recoverable_s, f.kind)))
    verdict, summary = _verdict(capture, enough, findings)
    return Diagnosis(tuple(capture), findings, verdict, summary)


def _measures(paths: Sequence[PathOrText]) -> list[Measures]:
    """One file after the other: a trace's events are gone before the next is read."""
    measured = [measure(read_trace(Path(path))) for path in paths]
    return sorted(measured, key=lambda m: (m.rank is None, m.rank or 0, m.file))


def _one_a_fault(found: list[Finding]) -> list[Finding]:
    """Without what a more exact rule explains, and each kind once, for the rank it hits most."""
    hidden = {
        (kind, f.label)
        for rule in RULES
        for f in found
        if f.kind == rule.kind
        for kind in rule.supersedes
    }
    kept: dict[str, list[Finding]] = {}
    for finding in found:
        if (finding.kind, finding.label) not in hidden:
            kept.setdefault(finding.kind, []).append(finding)
    return [_merged(findings) for findings in kept.values()]


def _merged(findings: list[Finding]) -> Finding:
    worst, *others = sorted(findings, key=lambda f: (-f.recoverable_s, f.label))
    if not others:
        return worst
    also = ", ".join(f"{f.label} {percent(f.share)}" for f in others[:8])
    more = f" and {len(others) - 8} more" if len(others) > 8 else ""
    return replace(worst, evidence=(*worst.evidence, f"the same on other ranks: {also}{more}"))


def _against(found: list[Finding], baseline: list[Measures]) -> list[Finding]:
    if not baseline:
        return found
    rules = {rule.kind: rule for rule in RULES}
    return [_compared(f, [rules[f.kind].share(m) for m in baseline]) for f in found]


def _compared(finding: Finding, shares: list[float | None]) -> Finding:
    known = [share for share in shares if share is not None]
    if not known or not finding.share:
        return finding
    usual = median(known)
    rise = finding.share - usual
    if rise < MIN_RISE:
        sentence = f"it was so before: the baseline has {percent(usual)}"
        return replace(finding, confidence="low", evidence=(*finding.evidence, sentence))
    return replace(
        finding,
        recoverable_s=finding.recoverable_s * min(1.0, rise / finding.share),
        evidence=(*finding.evidence, f"the baseline has {percent(usual)}"),
    )


def _verdict(
    capture: Sequence[Measures], enough: list[Measures], findings: Sequence[Finding]
) -> tuple[str, str]:
    if findings:
        first = findings[0]
        where = "" if len(capture) < 2 or first.label in first.evidence[0] else f"{first.label}: "
        return first.kind, where + first.evidence[0]
    short = [f"{m.label}: {m.shortage}" for m in capture if m.shortage]
    doubts = short + [doubt for m in enough for doubt in _doubts(m, alone=len(enough) == 1)]
    doubts += _uneven(enough)
    if doubts or not enough:
        return INCONCLUSIVE, doubts[0] if doubts else "there is no trace"
    return HEALTHY, _well(enough)


def _doubts(measures: Measures, alone: bool) -> list[str]:
    """What no rule explains and yet is not well."""
    doubts = []
    if measures.gpu is not None:
        idle = measures.share(difference(measures.gpu.idle, measures.loading))
        transfers = measures.share(measures.gpu.exposed_transfers)
        if idle > MAX_IDLE_SHARE:
            doubts.append(f"the GPU is idle for {percent(idle)} of the step for no visible reason")
        if transfers > MAX_EXPOSED_TRANSFER_SHARE:
            share = percent(transfers)
            doubts.append(
                f"{share} of the step is copies from or to the host that no compute hides"
            )
    elif alone and measures.share(exposed(measures)) > MAX_CPU_WAIT_SHARE:
        share = percent(measures.share(exposed(measures)))
        doubts.append(f"{share} of the step waits in collectives; the other ranks' traces say why")
    return [f"{measures.label}: {doubt}" for doubt in doubts]


def _uneven(measures: list[Measures]) -> list[str]:
    if len(measures) < 2:
        return []
    waits = sorted(measures, key=lambda m: m.share(exposed(m)))
    least, most = waits[0], waits[-1]
    gap = most.share(exposed(most)) - least.share(exposed(least))
    # On the CPU a straggler's rule has judged the steps one by one already.
    limit = MAX_UNEVEN_WAIT_SHARE if least.gpu else MAX_CPU_WAIT_SHARE
    if gap <= limit:
        return []
    return [
        f"{most.label} waits {percent(gap)} of the step more for collectives than {least.label}"
    ]


def _well(measures: list[Measures]) -> str:
    if all(m.gpu is not None for m in measures):
        busy = min(m.share(m.gpu.busy) for m in measures if m.gpu)
        return f"the GPU is busy for {percent(busy)} of the step and nothing stands out"
    busy = min(m.share(m.cpu.operators) for m in measures if m.cpu)
    return f"operators run for {percent(busy)} of the step and nothing stands out"
