"""Finds one rank that the others wait for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb
from statistics import median

from warpwatch_diagnosis.alignment import Alignment, slow_links
from warpwatch_diagnosis.before_after import kernel_changes, phases_ms
from warpwatch_diagnosis.intervals import Intervals, difference, total, union, within
from warpwatch_diagnosis.measures.cpu_time import CpuTime
from warpwatch_diagnosis.measures.gpu_work import slowdown
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import Capture, Confidence, DiagnosisRule, Finding, advice
from warpwatch_diagnosis.trace.events import grouped
from warpwatch_diagnosis.words import milliseconds, percent

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
        by_stage = grouped(capture, lambda m: m.stage[0] if m.stage else 0)
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
        if last is None or suspect not in (None, capture[last[0]].rank):
            return []
        rank, count, calls, lateness_us, chance = last
        measures = capture[rank]
        waits = [r.wait_share for r in ranks if r.measures is not measures]
        share = measures.share_of_us(lateness_us)
        if share <= MIN_CPU_WAIT or median(waits) <= ranks[rank].wait_share:
            return []
        sure: Confidence = "high" if share > HIGH_CPU_WAIT else "medium"
        evidence = (
            f"{measures.label} comes last to {count} of {calls} collectives, for which the others "
            f"wait {percent(min(waits))} to {percent(max(waits))} of the step",
            f"by chance one rank would be the last that often in {chance:.2g} of the captures",
        )
        text = advice(self.kind, "last", label=measures.label)
        return [self.finding(measures, min(1.0, share), lateness_us, sure, evidence, text)]

    def _on_gpu(self, capture: Capture, alignment: Alignment) -> list[Finding]:
        """Find the rank, or the node, that is last in nearly all collectives."""
        ranks = range(len(capture))
        blamed = [alignment.blamed_us(rank) for rank in ranks]
        culprit = max(ranks, key=lambda rank: blamed[rank])
        if found := self._late(capture, alignment, blamed, [culprit]):
            return found
        by_node = grouped(ranks, lambda rank: capture[rank].node)
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
        waits_us = {rank: alignment.exposed_wait_us(capture[rank]) for rank in others}
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


# Healthy peers differ by up to 14 % (PRISM, 2510.15596); cores shared with others by more.
MIN_LOCAL_RATIO = 1.25
# The others must wait longer than the culprit by this share of the window (our own value).
MIN_WAIT_EXCESS = 0.10
# A cause is there in nearly every step; noise changes sides.
MIN_CONSISTENCY = 0.80
# The limits for a rank that the detector of stragglers named, over many more steps (own values).
MIN_SUSPECT_RATIO = 1.10
MIN_SUSPECT_CONSISTENCY = 0.5
# Fewer calls of collectives do not show which rank is last (own values, as all below).
MIN_CALLS = 4
# One rank must be the last in this share of the calls.
MIN_LAST = 0.80
# In random order one of the ranks is last as often with at most this probability.
MAX_CHANCE = 1e-3
# If the others wait for less than this, the ranks come together.
MIN_LATENESS_US = 100.0
# The parts of a step on the CPU as the evidence names them, and the rules that say more.
OPERATORS = "operators"
CPU_PARTS: dict[str, tuple[str, ...]] = {
    "data loading": ("data_loading",),
    "compiling": ("recompilation",),
    "garbage collection": ("gc_pause",),
    "writing a checkpoint": ("checkpoint",),
    "reading values": ("sync_bound",),
    OPERATORS: (),
    "Python between the operators": (),
}


@dataclass(frozen=True, slots=True)
class RankSteps:
    """A rank on the CPU, in µs: each step without waiting, and the parts of the typical step."""

    measures: Measures
    local_us: list[float]
    parts_us: dict[str, float]
    wait_share: float

    @classmethod
    def of(cls, measures: Measures, cpu: CpuTime) -> RankSteps:
        steps = measures.steps
        waits = zip(steps, within(cpu.waiting, steps), strict=True)
        spent = zip(CPU_PARTS, _spent(measures, cpu), strict=True)
        return cls(
            measures=measures,
            local_us=[end - begin - us for (begin, end), us in waits],
            parts_us={part: median(within(us, steps)) for part, us in spent},
            wait_share=measures.share(cpu.waiting),
        )


def _spent(measures: Measures, cpu: CpuTime) -> tuple[Intervals, ...]:
    """Return disjoint parts in the order of CPU_PARTS."""
    patterns = union(cpu.reading + cpu.saving)
    return (
        measures.loading,
        cpu.compile,
        cpu.gc,
        union(cpu.checkpoint + cpu.saving),
        difference(cpu.reading, cpu.saving),
        difference(cpu.operators, patterns),
        difference(cpu.host, patterns),
    )


def lags(culprit: RankSteps, others: Sequence[RankSteps], is_suspect: bool) -> bool:
    """Return whether the steps of a rank are longer than those of the others."""
    steps = min(len(r.local_us) for r in (culprit, *others))
    ratio = MIN_SUSPECT_RATIO if is_suspect else MIN_LOCAL_RATIO
    consistency = MIN_SUSPECT_CONSISTENCY if is_suspect else MIN_CONSISTENCY
    longer = median(culprit.local_us) > ratio * median(median(r.local_us) for r in others)
    slower = sum(culprit.local_us[i] > max(r.local_us[i] for r in others) for i in range(steps))
    excess = min(r.wait_share for r in others) - culprit.wait_share
    return longer and slower >= consistency * steps and (is_suspect or excess > MIN_WAIT_EXCESS)


def last_rank(capture: Sequence[Measures]) -> tuple[int, int, int, float, float] | None:
    """Return the rank that nearly all calls wait for, or None.

    The last rank waits for nobody, so its calls are the shortest, and no clocks are compared. Its
    index comes with the calls in which it is last, all calls, the others' typical waiting for it in
    µs, and the probability that one of the ranks is last as often in random order.
    """
    calls = [[us - min(durations) for us in durations] for durations in _matched(capture)]
    late = [waits for waits in calls if median(sorted(waits)[1:]) >= MIN_LATENESS_US]
    if len(late) < MIN_CALLS:
        return None
    ((rank, count),) = Counter(waits.index(0.0) for waits in late).most_common(1)
    ranks = len(capture)
    chance = min(1.0, ranks * comb(len(late), count) / ranks**count)
    if count < MIN_LAST * len(late) or chance > MAX_CHANCE:
        return None
    lateness_us = sum(median(sorted(waits)[1:]) for waits in late if waits[rank] == 0.0)
    return rank, count, len(late), lateness_us, chance


def _matched(capture: Sequence[Measures]) -> list[list[float]]:
    """Return for each call that all ranks have the durations on the ranks."""
    found: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
    for measures in capture:
        calls = measures.cpu.calls if measures.cpu else ()
        for key, mine in grouped(calls, lambda call: call[:2]).items():
            found[key].append([took_us for _, _, took_us in mine])
    return [
        list(call)
        for ranks in found.values()
        if len(ranks) == len(capture) and len(set(map(len, ranks))) == 1
        for call in zip(*ranks, strict=True)
    ]
