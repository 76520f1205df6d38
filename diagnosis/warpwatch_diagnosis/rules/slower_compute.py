"""Finds kernels and operators that take longer than in the baseline."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_diagnosis.alignment import Alignment
from warpwatch_diagnosis.before_after import MIN_EXPLAINED, BaselineComparison, KernelChange
from warpwatch_diagnosis.rules.base import Capture, DiagnosisRule, Finding, advice


class SlowerComputeRule(DiagnosisRule):
    """Finds steps that are slower than in the baseline because they compute longer."""

    kind = "slower_compute"

    def find(self, capture: Capture, alignment: Alignment | None) -> list[Finding]:
        """Return nothing: a capture alone does not show it."""
        return []

    def against(self, capture: Capture, slower: Sequence[BaselineComparison]) -> list[Finding]:
        """Return a finding for each comparison that compute explains."""
        ranks = {measures.label: measures for measures in capture}
        found = []
        for one in slower:
            step_ms, compute_ms = one.now_step_ms - one.before_step_ms, max(0.0, one.compute_ms)
            if one.slowdown_ratio is None and compute_ms < MIN_EXPLAINED * step_ms:
                continue
            measures = ranks[one.label]
            saved_us = 1e3 * measures.step_count * max(0.0, min(step_ms, compute_ms))
            share = min(1.0, compute_ms / one.now_step_ms)
            more = [sentence for sentence in one.sentences if sentence not in one.summary]
            text = advice(self.kind, _variant(one))
            evidence = (one.summary, *more)
            found.append(self.finding(measures, share, saved_us, "medium", evidence, text))
        return found


def _variant(comparison: BaselineComparison) -> str:
    if comparison.slowdown_ratio is not None:
        return "alike"
    grown = comparison.grown
    is_more = isinstance(grown, KernelChange) and grown.change in ("new", "more")
    return "more" if is_more else "longer"
