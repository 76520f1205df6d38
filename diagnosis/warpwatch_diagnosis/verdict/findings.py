"""Reduces the rules' findings to one per fault, compared with the baseline and the anomaly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from warpwatch_diagnosis.comparison.alignment import Alignment
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules import RULES
from warpwatch_diagnosis.rules.base import Confidence, Finding, percent
from warpwatch_diagnosis.rules.serving import KvThrashRule
from warpwatch_diagnosis.rules.straggler import StragglerRule

# The findings that a kind of anomaly shows as; a straggler may show as any.
_SEEN_AS = {
    "data_stall": "data_loading",
    "comm_slow": "communication_bound",
    "gc_pause": "gc_pause",
    "kv_thrash": "kv_thrash",
    "latency_regression": "prefill_interference",
}
_SURER: dict[Confidence, Confidence] = {"low": "medium", "medium": "high", "high": "high"}


@dataclass(frozen=True, slots=True)
class Asked:
    """The anomaly that the capture is of: kind, rank, first step, and ratio to the usual time.

    Unknown fields are None.
    """

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
    """Put findings that the anomaly shows as first, with more confidence.

    The detector saw every step, the trace a few, so both together are surer than one.
    """
    if asked is None:
        return list(findings)
    ordered = sorted(findings, key=lambda f: not _is_same(f, asked))
    same = [
        replace(f, confidence=_SURER[f.confidence], evidence=(*f.evidence, asked.sentence))
        for f in ordered
        if _is_same(f, asked)
    ]
    return same + ordered[len(same) :]


def _is_same(finding: Finding, asked: Asked) -> bool:
    same_rank = asked.rank is None or finding.rank == asked.rank
    if asked.kind == "straggler":
        return asked.rank is not None and same_rank
    return same_rank and _SEEN_AS.get(asked.kind) == finding.kind


# A share that rose by less than this against the baseline is as usual.
MIN_RISE = 0.02
_SHOWN_RANKS = 8


def find(
    capture: Sequence[Measures],
    alignment: Alignment | None,
    baseline: Sequence[Measures],
    asked: Asked | None = None,
) -> list[Finding]:
    """Return findings by recoverable time, after those that the anomaly ``asked`` shows as."""
    found = [finding for rule in RULES for finding in rule.find(capture, alignment)]
    unnamed = not any(f.kind == StragglerRule.kind for f in found)
    if asked and asked.kind == StragglerRule.kind and asked.rank is not None and unnamed:
        found += StragglerRule().of_suspect(capture, asked.rank)
    if asked and asked.kind == KvThrashRule.kind and asked.kind not in {f.kind for f in found}:
        found += KvThrashRule().of_asked(capture)
    usual = {
        rule.kind: rule.usual_shares(baseline, alignment) if baseline else [] for rule in RULES
    }
    judged = [_against_baseline(f, usual[f.kind]) for f in _one_a_fault(found)]
    return corroborated(sorted(judged, key=lambda f: (-f.recoverable_s, f.kind)), asked)


def _one_a_fault(found: list[Finding]) -> list[Finding]:
    """Drop findings that a more exact rule explains; merge those of a kind over ranks."""
    supersedes = {rule.kind: rule.supersedes for rule in RULES}
    present = {(f.kind, f.label) for f in found}
    exact = {f: [k for k in f.yields_to if (k, f.label) in present] for f in found}
    hidden = {(kind, f.label) for f in found if not exact[f] for kind in supersedes[f.kind]}
    kept: dict[str, list[Finding]] = {}
    for finding in found:
        if exact[finding] or (finding.kind, finding.label) in hidden:
            continue
        also = [
            f.evidence[0] for f in found if finding.kind in exact[f] and f.label == finding.label
        ]
        finding = replace(finding, evidence=(*finding.evidence, *also))
        kept.setdefault(finding.kind, []).append(finding)
    return [_merged(findings) for findings in kept.values()]


def _merged(findings: list[Finding]) -> Finding:
    worst, *others = sorted(findings, key=lambda f: (-f.recoverable_s, f.label))
    if not others:
        return worst
    also = ", ".join(f"{f.label} {percent(f.share)}" for f in others[:_SHOWN_RANKS])
    rest = len(others) - _SHOWN_RANKS
    more = f" and {rest} more" if rest > 0 else ""
    return replace(worst, evidence=(*worst.evidence, f"the same on other ranks: {also}{more}"))


def _against_baseline(finding: Finding, usual_shares: list[float]) -> Finding:
    """Lower the confidence of a fault that the baseline has, too; only the surplus counts."""
    if not usual_shares or not finding.share:
        return finding
    usual = median(usual_shares)
    rise = finding.share - usual
    before = "it was so before: " if rise < MIN_RISE else ""
    return replace(
        finding,
        recoverable_s=finding.recoverable_s * min(1.0, max(0.0, rise / finding.share)),
        confidence="low" if before else finding.confidence,
        evidence=(*finding.evidence, f"{before}the baseline has {percent(usual)}"),
    )
