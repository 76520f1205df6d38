"""Finds one rank that the others wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from warpwatch_diagnosis.advice import advice
from warpwatch_diagnosis.comparison.alignment import Alignment, exposed_transfer_us, slow_links
from warpwatch_diagnosis.comparison.before_after import kernel_changes, phases_ms
from warpwatch_diagnosis.comparison.cpu_ranks import (
    CPU_PARTS,
    OPERATORS,
    RankSteps,
    lags,
    last_rank,
)
from warpwatch_diagnosis.measures.intervals import total
from warpwatch_diagnosis.measures.kernels import slowdown
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import (
    Capture,
    Confidence,
    DiagnosisRule,
    Finding,
    milliseconds,
    percent,
)

# Operators that are slower on one rank by less than this may only have shared their cores for a
# moment: the rank is named with low confidence.
MIN_OPERATOR_RATIO = 2.0
HIGH_RATIO = 1.5
# The share of the window in which the others wait for a CPU rank that is last in nearly all
# collectives. Shared cores make ranks late by a few per cent (own values).
MIN_CPU_WAIT = 0.10
HIGH_CPU_WAIT = 0.20
# On GPUs: the share of the window in which the others wait (reference of this project), and the
# share that no compute hides. The share of all lateness that the rank must bring (own values).
MIN_GPU_WAIT = 0.05
MIN_EXPOSED_WAIT = 0.025
MIN_BLAME = 0.60
HIGH_GPU_WAIT = 0.15
# If a rank has more synchronizing calls a step than the others by this, the calls differ.
MAX_WAITS_RATIO = 1.1
# One factor for all kernels is the reason if it explains this share of the longer compute (own
# value).
MIN_EXPLAINED = 0.25
# The phase that takes longer on the rank, and the rules that say more about it.
_REASONS = {
    "compute": ("its kernels", ()),
    "exposed_copies": ("copies", ("transfer_bound",)),
    "idle: compile": ("compiling", ("recompilation",)),
    "idle: gc": ("garbage collection", ("gc_pause",)),
    "idle: checkpoint": ("writing a checkpoint", ("checkpoint",)),
    "idle: data_loading": ("data loading", ("data_loading",)),
    "idle: allocator": ("getting memory from the driver", ("allocator_thrash",)),
    "idle: synchronization": ("synchronizing with its GPU", ("sync_bound",)),
    "idle: copy": ("waiting for copies", ("transfer_bound",)),
    "idle: launch": ("launching kernels", ()),
    "idle: dispatch": ("the host's price of its operators", ()),
    "idle: host": ("the host's own work", ()),
}


class StragglerRule(DiagnosisRule):
    """Finds the rank by collectives on GPUs; on the CPU by longer steps or by being last."""

    kind = "straggler"
    supersedes = ("host_bound", "launch_bound", "sync_bound")

    def find(self, capture: Capture, alignment: Alignment | None) -> list[Finding]:
        if alignment is not None:
            return self._on_gpu(capture, alignment)
        by_stage: dict[int, list[Measures]] = defaultdict(list)
        for measures in capture:
            by_stage[measures.stage[0] if measures.stage else 0].append(measures)
        return [found for alike in by_stage.values() for found in self._on_cpu(alike)]

    def of_suspect(self, capture: Capture, rank: int) -> list[Finding]:
        """Find a rank that was late over many steps before the capture: less is enough for it."""
        stages = [measures.stage for measures in capture if measures.rank == rank]
        return self._on_cpu([m for m in capture if [m.stage] == stages], rank)

    def _on_cpu(self, capture: Capture, suspect: int | None = None) -> list[Finding]:
        """Find the rank with the longest steps without waiting."""
        ranks = [RankSteps.of(m, m.cpu) for m in capture if m.cpu is not None and m.steps]
        if len(capture) != len(ranks) or len(ranks) < 2:
            return []
        culprit = max(ranks, key=lambda r: median(r.local_us))
        measures = culprit.measures
        if suspect not in (None, measures.rank):
            return []
        others = [r for r in ranks if r is not culprit]
        usual = {part: median(r.parts_us[part] for r in others) for part in culprit.parts_us}
        part = max(usual, key=lambda name: culprit.parts_us[name] - usual[name])
        own, typical = median(culprit.local_us), median(median(r.local_us) for r in others)
        if not lags(culprit, others, is_suspect=suspect is not None):
            return self._last_on_cpu(capture, ranks, suspect)
        shared_cores = part == OPERATORS and own < MIN_OPERATOR_RATIO * typical
        sure: Confidence = "high" if own > HIGH_RATIO * typical else "medium"
        lost_us = (own - typical) * len(measures.steps)
        evidence = (
            f"{measures.label} keeps the others waiting: without waiting its step takes "
            f"{milliseconds(own)}, theirs {milliseconds(typical)}",
            f"the difference is {part}: {milliseconds(culprit.parts_us[part])} a step "
            f"against {milliseconds(usual[part])}",
            f"the others wait {percent(min(r.wait_share for r in others))} of the time or "
            f"more for collectives, {measures.label} {percent(culprit.wait_share)}",
        )
        text = advice(self.kind, "cpu", label=measures.label)
        share, confidence = measures.share_of_us(lost_us), "low" if shared_cores else sure
        return [self.finding(measures, share, lost_us, confidence, evidence, text, CPU_PARTS[part])]

    def _last_on_cpu(
        self, capture: Capture, ranks: Sequence[RankSteps], suspect: int | None
    ) -> list[Finding]:
        """Find the rank that is last in nearly all collectives, if the others wait long."""
        last = last_rank(capture)
        if last is None or suspect not in (None, capture[last.rank].rank):
            return []
        measures = capture[last.rank]
        waits = [r.wait_share for r in ranks if r.measures is not measures]
        share = measures.share_of_us(last.lateness_us)
        if share <= MIN_CPU_WAIT or median(waits) <= ranks[last.rank].wait_share:
            return []
        sure: Confidence = "high" if share > HIGH_CPU_WAIT else "medium"
        evidence = (
            f"{measures.label} comes last to {last.count} of {last.calls} collectives, "
            f"for which the others wait {percent(min(waits))} to {percent(max(waits))} of "
            "the step",
            f"by chance one rank would be the last that often in {last.chance:.2g} of the captures",
        )
        text = advice(self.kind, "last", label=measures.label)
        return [self.finding(measures, min(1.0, share), last.lateness_us, sure, evidence, text)]

    def _on_gpu(self, capture: Capture, alignment: Alignment) -> list[Finding]:
        """Find the rank, or the node, that is last in nearly all collectives."""
        ranks = range(len(capture))
        blamed = [alignment.blamed_us(rank) for rank in ranks]
        culprit = max(ranks, key=lambda rank: blamed[rank])
        if found := self._late(capture, alignment, blamed, [culprit]):
            return found
        by_node: dict[str | None, list[int]] = defaultdict(list)
        for rank in ranks:
            by_node[capture[rank].node].append(rank)
        worst = max(by_node.values(), key=lambda found: sum(blamed[rank] for rank in found))
        if None in by_node or len(by_node) < 2 or len(worst) < 2:
            return []
        return self._late(capture, alignment, blamed, worst)

    def _late(
        self,
        capture: Capture,
        alignment: Alignment,
        blamed: Sequence[float],
        culprits: Sequence[int],
    ) -> list[Finding]:
        """Find ``culprits``, one rank or those of one node; ``blamed``: lateness in µs by rank."""
        culprit = max(culprits, key=lambda rank: blamed[rank])
        measures = capture[culprit]
        others = [rank for rank in range(len(capture)) if rank not in culprits]
        late_us = sum(blamed[rank] for rank in culprits)
        waits_us = {rank: _exposed_wait_us(capture[rank], rank, alignment) for rank in others}
        share = median(waits_us[rank] / (capture[rank].window_us or 1.0) for rank in others)
        late = late_us > MIN_GPU_WAIT * measures.window_us
        if not late or share <= MIN_EXPOSED_WAIT or late_us < MIN_BLAME * sum(blamed):
            return []
        sentence, yields_to, text = _reason(measures, [capture[rank] for rank in others])
        name = measures.label if len(culprits) == 1 else f"node {measures.node}"
        one = "" if len(culprits) == 1 else f"one of the {len(culprits)} ranks of "
        sure: Confidence = "high" if share > HIGH_GPU_WAIT else "medium"
        evidence = (
            f"{name} keeps the others waiting: {percent(share)} of their step is collectives "
            f"that {one}{name} enters last",
            sentence,
            _lateness(measures, culprit, alignment),
            *slow_links(capture, alignment, culprits),
        )
        recoverable_us = median(waits_us.values())
        finding = self.finding(
            measures, min(1.0, share), recoverable_us, sure, evidence, text, yields_to
        )
        return [finding if len(culprits) == 1 else replace(finding, rank=None)]


def _exposed_wait_us(measures: Measures, rank: int, alignment: Alignment) -> float:
    exposed_us = total(measures.gpu.exposed_communication) if measures.gpu else 0.0
    return exposed_us - exposed_transfer_us(measures, rank, alignment)


def _lateness(measures: Measures, rank: int, alignment: Alignment) -> str:
    late = [m for m in alignment.matched if m.last == rank]
    worst = max(late, key=lambda m: m.lateness_us)
    return (
        f"{measures.label} is the last in {len(late):,} of {len(alignment.matched):,} matched "
        f"collectives; in the worst, {worst.name}, the others wait "
        f"{milliseconds(worst.lateness_us)} for a transfer of {milliseconds(worst.transfer_us)}"
    )


def _reason(measures: Measures, peers: Sequence[Measures]) -> tuple[str, tuple[str, ...], str]:
    """Compare the rank's step with its peers': return a sentence, more exact kinds, advice."""
    usual_waits = median(_waits_a_step(peer) for peer in peers)
    as_usual = _waits_a_step(measures) <= MAX_WAITS_RATIO * usual_waits
    mine, *theirs = (_parts_ms(m, as_usual) for m in (measures, *peers))
    usual = {phase: median(other[phase] for other in theirs) for phase in _REASONS}
    phase = max(_REASONS, key=lambda name: mine[name] - usual[name])
    reason, kinds = _REASONS[phase]
    sentence = (
        f"the difference is {reason}: {mine[phase]:,.1f} ms a step against {usual[phase]:,.1f} ms"
    )
    if phase == "compute":
        surplus = mine[phase] / usual[phase] - 1 if usual[phase] else 0.0
        detail, text = _slow_kernels(measures, peers, surplus)
        return f"{sentence}; {detail}", kinds, text
    return sentence, kinds, advice("straggler", "host", label=measures.label)


def _waits_a_step(measures: Measures) -> float:
    return measures.synchronization.count / measures.step_count


def _parts_ms(measures: Measures, waits_as_usual: bool) -> dict[str, float]:
    """Return the phases of one step of the device.

    Waits that every rank has in its step make none of them late: then the host is slow.
    """
    # The host is ahead by the collectives that it launched and the device has not begun.
    found = measures.gpu.collectives if measures.gpu else ()
    begun = sum(c.begin_us < measures.window[1] for c in found)
    ahead = len(found) / begun if begun else 1.0
    parts = {phase: ms * ahead for phase, ms in phases_ms(measures).items()}
    if waits_as_usual:
        parts["idle: host"] += parts["idle: synchronization"]
        parts["idle: synchronization"] = 0.0
    return parts


def _slow_kernels(measures: Measures, peers: Sequence[Measures], surplus: float) -> tuple[str, str]:
    """Return a clause and advice: lower clocks slow every kernel alike, more data does not.

    ``surplus``: the share by which compute is longer, most of which the factor must explain.
    """
    typical = sorted(peers, key=lambda m: total(m.gpu.compute) if m.gpu else 0.0)[len(peers) // 2]
    changes = kernel_changes(measures, typical)
    factor = slowdown(*(m.gpu.sizes if m.gpu else {} for m in (measures, typical)))
    if factor is not None and factor - 1 > MIN_EXPLAINED * surplus:
        return (
            f"the same kernels are all {100 * (factor - 1):.0f} % slower than on {typical.label}, "
            "as with lower clocks",
            advice("straggler", "clocks", label=measures.label),
        )
    shown = [f"{k.name[:40]} {k.before_ms:,.1f} -> {k.now_ms:,.1f} ms" for k in changes[:3]]
    return (
        f"it has more work than {typical.label} rather than slower clocks, for its kernels differ "
        f"unevenly: {', '.join(shown)}",
        advice("straggler", "work", label=measures.label),
    )
