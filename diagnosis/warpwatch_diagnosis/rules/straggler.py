"""One rank keeps the others waiting.

On GPUs the ranks' collectives show who came last (alignment.py); on the CPU the training thread's
wait is in the trace, and the straggler's steps are longer without it, or it is the last in nearly
all collectives (arrivals.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

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
from warpwatch_diagnosis.rules.base import Confidence, DiagnosisRule, Finding, milliseconds, percent

# Operators that merely run slower on one rank may have shared their cores for a moment: below this
# it is named with low confidence.
MIN_OPERATOR_RATIO = 2.0
HIGH_RATIO = 1.5
# On the CPU: of the window that the others wait for one rank, which is last in nearly all
# collectives; cores that are shared make ranks late by some per cent (own values).
MIN_CPU_WAIT = 0.10
HIGH_CPU_WAIT = 0.20
# On GPUs: of the window that the others wait (reference of this project) and how much of it at
# least no compute hides; how much of all lateness one rank must bring to be the one (own values).
MIN_GPU_WAIT = 0.05
MIN_EXPOSED_WAIT = 0.025
MIN_BLAME = 0.60
# With more synchronizing calls a step than the others by this, the calls are what differs.
MAX_WAITS_RATIO = 1.1
# Of the longer compute, what one factor for all kernels must explain to be the reason (own value).
MIN_EXPLAINED = 0.25
HIGH_GPU_WAIT = 0.15
# What a rank did longer, and the rule that says more about it.
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
    kind = "straggler"
    supersedes = ("host_bound", "launch_bound", "sync_bound")

    def find(self, capture: Sequence[Measures], alignment: Alignment | None) -> list[Finding]:
        if alignment is not None:
            return self._on_gpu(capture, alignment)
        by_stage: dict[int, list[Measures]] = defaultdict(list)
        for measures in capture:
            by_stage[measures.stage[0] if measures.stage else 0].append(measures)
        return [found for alike in by_stage.values() for found in self._on_cpu(alike)]

    def of_suspect(self, capture: Sequence[Measures], rank: int) -> list[Finding]:
        """Of a rank that was late over many steps before the capture: less is enough in it."""
        stages = [measures.stage for measures in capture if measures.rank == rank]
        return self._on_cpu([m for m in capture if [m.stage] == stages], rank)

    def _on_cpu(self, capture: Sequence[Measures], suspect: int | None = None) -> list[Finding]:
        """The rank with the longest steps without waiting."""
        ranks = [RankSteps.of(m, m.cpu) for m in capture if m.cpu is not None and m.steps]
        if len(capture) != len(ranks) or len(ranks) < 2:
            return []
        culprit = max(ranks, key=lambda r: median(r.local_us))
        if suspect not in (None, culprit.measures.rank):
            return []
        others = [r for r in ranks if r is not culprit]
        usual = {part: median(r.parts_us[part] for r in others) for part in culprit.parts_us}
        part = max(usual, key=lambda name: culprit.parts_us[name] - usual[name])
        own, typical = median(culprit.local_us), median(median(r.local_us) for r in others)
        if not lags(culprit, others, is_suspect=suspect is not None):
            return self._last_on_cpu(capture, ranks, suspect)
        shared_cores = part == OPERATORS and own < MIN_OPERATOR_RATIO * typical
        sure: Confidence = "high" if own > HIGH_RATIO * typical else "medium"
        measures = culprit.measures
        lost_us = (own - typical) * len(measures.steps)
        return [
            self.finding(
                measures,
                share=measures.share_of_us(lost_us),
                recoverable_us=lost_us,
                confidence="low" if shared_cores else sure,
                evidence=(
                    f"{measures.label} keeps the others waiting: without waiting its step takes "
                    f"{milliseconds(own)}, theirs {milliseconds(typical)}",
                    f"the difference is {part}: {milliseconds(culprit.parts_us[part])} a step "
                    f"against {milliseconds(usual[part])}",
                    f"the others wait {percent(min(r.wait_share for r in others))} of the time or "
                    f"more for collectives, {measures.label} {percent(culprit.wait_share)}",
                ),
                advice=(
                    f"Look at what {measures.label} alone does (rank-dependent code, logging, "
                    "validation, a larger share of the data) and at its machine: load, clocks, "
                    "throttling."
                ),
                yields_to=CPU_PARTS[part],
            )
        ]

    def _last_on_cpu(
        self, capture: Sequence[Measures], ranks: Sequence[RankSteps], suspect: int | None
    ) -> list[Finding]:
        """Whom the others wait for in nearly all collectives, if they wait long."""
        last = last_rank(capture)
        if last is None or suspect not in (None, capture[last.rank].rank):
            return []
        measures = capture[last.rank]
        waits = [r.wait_share for r in ranks if r.measures is not measures]
        share = measures.share_of_us(last.lateness_us)
        if share <= MIN_CPU_WAIT or median(waits) <= ranks[last.rank].wait_share:
            return []
        sure: Confidence = "high" if share > HIGH_CPU_WAIT else "medium"
        return [
            self.finding(
                measures,
                share=min(1.0, share),
                recoverable_us=last.lateness_us,
                confidence=sure,
                evidence=(
                    f"{measures.label} comes last to {last.count} of {last.calls} collectives, "
                    f"for which the others wait {percent(min(waits))} to {percent(max(waits))} of "
                    "the step",
                    f"by chance one rank would be the last that often in {last.chance:.2g} of the "
                    "captures",
                ),
                advice=(
                    f"Look at what {measures.label} alone does before its collectives (larger "
                    "embedding tables or shards, rank-dependent code) and at its machine: load, "
                    "cores."
                ),
            )
        ]

    def _on_gpu(self, capture: Sequence[Measures], alignment: Alignment) -> list[Finding]:
        """Whom the others wait for, if it is (nearly) always the same rank, or the same node."""
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
        capture: Sequence[Measures],
        alignment: Alignment,
        blamed: Sequence[float],
        culprits: Sequence[int],
    ) -> list[Finding]:
        """``blamed``: µs by rank; ``culprits``: one rank, or those of one node."""
        culprit = max(culprits, key=lambda rank: blamed[rank])
        others = [rank for rank in range(len(capture)) if rank not in culprits]
        late_us = sum(blamed[rank] for rank in culprits)
        waits_us = {rank: _exposed_wait_us(capture[rank], rank, alignment) for rank in others}
        share = median(waits_us[rank] / (capture[rank].window_us or 1.0) for rank in others)
        late = late_us > MIN_GPU_WAIT * capture[culprit].window_us
        if not late or share <= MIN_EXPOSED_WAIT or late_us < MIN_BLAME * sum(blamed):
            return []
        measures = capture[culprit]
        sentence, yields_to, advice = _reason(measures, [capture[rank] for rank in others])
        who = measures.label if len(culprits) == 1 else f"node {measures.node}"
        one = "" if len(culprits) == 1 else f"one of the {len(culprits)} ranks of "
        links = slow_links(capture, alignment, culprits)
        finding = self.finding(
            measures,
            share=min(1.0, share),
            recoverable_us=median(waits_us.values()),
            confidence="high" if share > HIGH_GPU_WAIT else "medium",
            evidence=(
                f"{who} keeps the others waiting: {percent(share)} of their step is collectives "
                f"that {one}{who} enters last",
                sentence,
                _lateness(measures, culprit, alignment),
                *links,
            ),
            advice=advice,
            yields_to=yields_to,
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
    """What the rank did longer than its peers in a step: sentence, more exact kinds, advice."""
    usual_waits = median(_waits_a_step(peer) for peer in peers)
    as_usual = _waits_a_step(measures) <= MAX_WAITS_RATIO * usual_waits
    mine, *theirs = (_parts_ms(m, as_usual) for m in (measures, *peers))
    usual = {phase: median(other[phase] for other in theirs) for phase in _REASONS}
    phase = max(_REASONS, key=lambda name: mine[name] - usual[name])
    what, kinds = _REASONS[phase]
    sentence = (
        f"the difference is {what}: {mine[phase]:,.1f} ms a step against {usual[phase]:,.1f} ms"
    )
    if phase == "compute":
        surplus = mine[phase] / usual[phase] - 1 if usual[phase] else 0.0
        detail, advice = _slow_kernels(measures, peers, surplus)
        return f"{sentence}; {detail}", kinds, advice
    advice = (
        f"Look at what {measures.label} alone does (rank-dependent code, logging, validation) and "
        "at its machine: load of the cores, CPU pinning, a slow disk."
    )
    return sentence, kinds, advice


def _waits_a_step(measures: Measures) -> float:
    return measures.synchronization.count / measures.step_count


def _parts_ms(measures: Measures, waits_as_usual: bool) -> dict[str, float]:
    """Of one step of the device. A wait that every rank has in its step makes none of them late:
    then its host is slow."""
    parts = {phase: ms * _ahead(measures) for phase, ms in phases_ms(measures).items()}
    if waits_as_usual:
        parts["idle: host"] += parts["idle: synchronization"]
        parts["idle: synchronization"] = 0.0
    return parts


def _ahead(measures: Measures) -> float:
    """Steps that the host did for each of the device's in the window, by their collectives."""
    found = measures.gpu.collectives if measures.gpu else ()
    begun = sum(c.begin_us < measures.window[1] for c in found)
    return len(found) / begun if begun else 1.0


def _slow_kernels(measures: Measures, peers: Sequence[Measures], surplus: float) -> tuple[str, str]:
    """Lower clocks make every kernel slower alike; more data makes more or longer ones.

    ``surplus``: of the compute of a step, most of which the factor has to explain.
    """
    typical = sorted(peers, key=lambda m: total(m.gpu.compute) if m.gpu else 0.0)[len(peers) // 2]
    changes = kernel_changes(measures, typical)
    factor = slowdown(*(m.gpu.sizes if m.gpu else {} for m in (measures, typical)))
    if factor is not None and factor - 1 > MIN_EXPLAINED * surplus:
        return (
            f"the same kernels are all {100 * (factor - 1):.0f} % slower than on {typical.label}, "
            "as with lower clocks",
            f"Check {measures.label}'s GPU for throttling (clocks, temperature, power cap, ECC "
            "errors: nvidia-smi -q -d CLOCK,PERFORMANCE,POWER) and take its node out if it stays "
            "slow.",
        )
    shown = [f"{k.name[:40]} {k.before_ms:,.1f} -> {k.now_ms:,.1f} ms" for k in changes[:3]]
    return (
        f"it has more work than {typical.label} rather than slower clocks, for its kernels differ "
        f"unevenly: {', '.join(shown)}",
        "Balance the data: the same number of tokens on every rank (length-grouped batches, "
        f"DistributedSampler with drop_last), and look for layers that {measures.label} alone has.",
    )
