"""The measures of a capture become a diagnosis: asks the rules, keeps one finding a fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from warpwatch_diagnosis.comparison.alignment import Alignment, align, exposed_transfer_us
from warpwatch_diagnosis.comparison.before_after import MIN_STEP_RATIO, Comparison, compare_captures
from warpwatch_diagnosis.comparison.completeness import waits_for_missing
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.idle import CAUSES
from warpwatch_diagnosis.measures.intervals import difference, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules import RULES
from warpwatch_diagnosis.rules.base import Finding, percent
from warpwatch_diagnosis.rules.communication_bound import CommunicationBound, exposed

SCHEMA = 1
HEALTHY = "healthy"
INCONCLUSIVE = "inconclusive"
# Idle time (TraceLens) and waiting for other ranks that no rule explains are reasons not to say
# healthy. Losses of several kinds, each too small for a rule, may together be no more than that.
MAX_IDLE_SHARE = 0.15
MAX_LOST_SHARE = 0.15
MAX_UNEVEN_WAIT_SHARE = 0.10
MAX_CPU_WAIT_SHARE = 0.25
# Without steps the window begins with the GPU's first work, so the first batch's fetching is not in
# it, and work queued meanwhile may hide the next ones' (data_loading's limit for a CPU's work).
MAX_LOADING_SHARE = 0.10
# A share that rose by less than this against the baseline is as usual.
MIN_RISE = 0.02


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the traces of one capture say. ``findings``: most recoverable time first.

    alignment: None unless there are several ranks with GPUs whose collectives match. comparison:
    with the baseline, rank by rank; empty without one.
    """

    measures: tuple[Measures, ...]
    findings: tuple[Finding, ...]
    verdict: str
    summary: str
    alignment: Alignment | None = None
    comparison: tuple[Comparison, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Schema 1, described in docs/diagnosis.md."""
        return {
            "schema": SCHEMA,
            "traces": [m.to_json() for m in self.measures],
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
) -> Diagnosis:
    """The verdict on the ranks of one capture; ``missing``: ranks without a trace, and why."""
    enough = [m for m in capture if m.shortage is None]
    well = [m for m in baseline if m.shortage is None]
    alignment, comparison = align(enough), compare_captures(enough, well)
    doubts = _waiting(enough, missing or {})
    findings = _findings(enough, well, unsure=(CommunicationBound.kind,) if doubts else ())
    doubts += [
        _slower(c) for c in comparison if max(c.step_ratio, c.slowdown or 0.0) > MIN_STEP_RATIO
    ]
    sure = [f for f in findings if f.confidence != "low"]
    if sure or (findings and not doubts):
        first = (sure or findings)[0]
        verdict, summary = first.kind, _first(first, several=len(capture) > 1)
    else:
        verdict, summary = _without_findings(capture, enough, alignment, doubts)
    summary += _unusable(enough, baseline, comparison)
    return Diagnosis(tuple(capture), tuple(findings), verdict, summary, alignment, comparison)


def _findings(
    enough: list[Measures], baseline: list[Measures], unsure: Sequence[str]
) -> list[Finding]:
    """``unsure``: kinds that something else than what they name may explain as well."""
    found = [finding for rule in RULES for finding in rule.find(enough)]
    found = [
        replace(f, confidence="low") if f.kind in unsure else f
        for f in _against(_one_a_fault(found), enough, baseline)
    ]
    return sorted(found, key=lambda f: (-f.recoverable_s, f.kind))


def _unusable(
    enough: list[Measures], baseline: Sequence[Measures], comparison: Sequence[Comparison]
) -> str:
    """That a baseline was given and is of no use, to be added to the summary."""
    if not baseline or not enough or comparison:
        return ""
    short = next((m for m in baseline if m.shortage), None)
    unlike = "only one of the two has GPU events, or annotated steps"
    return f"; the baseline cannot be compared: {short.shortage if short else unlike}"


def _one_a_fault(found: list[Finding]) -> list[Finding]:
    """Without what a more exact rule explains, and each kind once, for the rank it hits most."""
    supersedes = {rule.kind: rule.supersedes for rule in RULES}
    present = {(f.kind, f.label) for f in found}
    exact = {f: [k for k in f.yields_to if (k, f.label) in present] for f in found}
    hidden = {(kind, f.label) for f in found if not exact[f] for kind in supersedes.get(f.kind, ())}
    kept: dict[str, list[Finding]] = {}
    for finding in found:
        if exact[finding] or (finding.kind, finding.label) in hidden:
            continue
        also = [
            f.evidence[0] for f in found if finding.kind in exact[f] and f.label == finding.label
        ]
        told = replace(finding, evidence=(*finding.evidence, *also))
        kept.setdefault(finding.kind, []).append(told)
    return [_merged(findings) for findings in kept.values()]


def _merged(findings: list[Finding]) -> Finding:
    worst, *others = sorted(findings, key=lambda f: (-f.recoverable_s, f.label))
    if not others:
        return worst
    also = ", ".join(f"{f.label} {percent(f.share)}" for f in others[:8])
    more = f" and {len(others) - 8} more" if len(others) > 8 else ""
    return replace(worst, evidence=(*worst.evidence, f"the same on other ranks: {also}{more}"))


def _against(
    found: list[Finding], capture: list[Measures], baseline: list[Measures]
) -> list[Finding]:
    if not baseline:
        return found
    usual = {rule.kind: [rule.share(m) for m in baseline] for rule in RULES}
    usual[CommunicationBound.kind] = CommunicationBound().usual_shares(capture, baseline)
    return [_compared(f, usual[f.kind]) for f in found]


def _compared(finding: Finding, shares: list[float | None]) -> Finding:
    known = [share for share in shares if share is not None]
    if not known or not finding.share:
        return finding
    usual = median(known)
    rise = finding.share - usual
    before = "it was so before: " if rise < MIN_RISE else ""
    return replace(
        finding,
        recoverable_s=finding.recoverable_s * min(1.0, max(0.0, rise / finding.share)),
        confidence="low" if before else finding.confidence,
        evidence=(*finding.evidence, f"{before}the baseline has {percent(usual)}"),
    )


def _first(finding: Finding, several: bool) -> str:
    where = f"{finding.label}: " if several and finding.label not in finding.evidence[0] else ""
    return where + finding.evidence[0]


def _without_findings(
    capture: Sequence[Measures],
    enough: list[Measures],
    alignment: Alignment | None,
    known: list[str],
) -> tuple[str, str]:
    """``known``: the doubts that say most."""
    doubts = known + [f"{m.label}: {m.shortage}" for m in capture if m.shortage]
    doubts += [doubt for m in enough for doubt in _doubts(m, alone=len(enough) == 1)]
    doubts += _uneven(enough) + _by_turns(enough, alignment)
    doubts += [
        _together(m, m.gpu) for m in enough if m.gpu and _lost_share(m, m.gpu) > MAX_LOST_SHARE
    ]
    if doubts or not enough:
        return INCONCLUSIVE, doubts[0] if doubts else "there is no trace"
    return HEALTHY, _well(enough)


def _doubts(measures: Measures, alone: bool) -> list[str]:
    """What no rule explains and yet is not well."""
    doubts = []
    if measures.gpu is not None:
        idle = measures.share(measures.gpu.idle)
        if idle > MAX_IDLE_SHARE:
            doubts.append(f"the GPU is idle for {percent(idle)} of the step {_most(measures.gpu)}")
        loading = measures.share(measures.loading)
        if not measures.steps and loading > MAX_LOADING_SHARE:
            doubts.append(
                f"fetching batches takes {percent(loading)} of the time, and whether the GPU waits "
                "for it is not sure without annotated steps; call profiler.step() in the loop"
            )
    elif alone and measures.share(exposed(measures)) > MAX_CPU_WAIT_SHARE:
        share = percent(measures.share(exposed(measures)))
        doubts.append(f"{share} of the step waits in collectives; the other ranks' traces say why")
    return [f"{measures.label}: {doubt}" for doubt in doubts]


def _lost_share(measures: Measures, gpu: GpuTime) -> float:
    """Idle time that is more than what the device takes between two kernels, and what of
    communication and copies no compute hides."""
    idle = difference(gpu.idle, gpu.idle_time.by_cause["kernel_gap"])
    return measures.share(union(idle + exposed(measures) + gpu.exposed_transfers))


def _together(measures: Measures, gpu: GpuTime) -> str:
    parts = (
        ("idle time", difference(gpu.idle, exposed(measures))),
        ("exposed communication", exposed(measures)),
        ("exposed copies", gpu.exposed_transfers),
    )
    named = ", ".join(f"{name} {percent(measures.share(us))}" for name, us in parts if us)
    lost = percent(_lost_share(measures, gpu))
    return (
        f"{measures.label}: {lost} of the step is lost for several reasons of which none stands "
        f"out: {named}"
    )


def _waiting(measures: list[Measures], missing: Mapping[int, str]) -> list[str]:
    """Long waits, where the trace of whom they are for may be missing."""
    if not measures:
        return []
    worst = max(measures, key=lambda m: m.share(exposed(m)))
    share = worst.share(exposed(worst))
    if share <= (MAX_UNEVEN_WAIT_SHARE if worst.gpu else MAX_CPU_WAIT_SHARE):
        return []
    return waits_for_missing(measures, missing, worst.label, percent(share))


def _most(gpu: GpuTime) -> str:
    """The largest part of the idle time, which is too small for a finding of its own."""
    cause = max(CAUSES, key=gpu.idle_time.total_us)
    if cause in ("unexplained", "kernel_gap"):
        return "for no visible reason"
    return f"for several reasons, of which {cause.replace('_', ' ')} takes most"


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


def _by_turns(measures: list[Measures], alignment: Alignment | None) -> list[str]:
    """Ranks that wait long for each other although none of them is always the last."""
    if alignment is None:
        return []
    waits = [
        (m.share(exposed(m)) * m.window_us - exposed_transfer_us(m, rank, alignment)) / m.window_us
        for rank, m in enumerate(measures)
    ]
    if median(waits) <= MAX_UNEVEN_WAIT_SHARE:
        return []
    return [
        f"ranks wait {percent(median(waits))} of the step for each other by turns: the work of a "
        "step is uneven, as with sequences of different length"
    ]


def _slower(comparison: Comparison) -> str:
    return "; ".join(comparison.sentences[:1] + comparison.sentences[-1:])


def _well(measures: list[Measures]) -> str:
    if all(m.gpu is not None for m in measures):
        busy = min(m.share(m.gpu.busy) for m in measures if m.gpu)
        return f"the GPU is busy for {percent(busy)} of the step and nothing stands out"
    busy = min(m.share(m.cpu.operators) for m in measures if m.cpu)
    return f"operators run for {percent(busy)} of the step and nothing stands out"
