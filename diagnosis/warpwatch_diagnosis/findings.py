"""Reduces the rules' findings to one per fault, else gives doubts and the likeliest cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from warpwatch_diagnosis.alignment import Alignment
from warpwatch_diagnosis.before_after import BaselineComparison
from warpwatch_diagnosis.intervals import Intervals, difference, total, union
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.host_events import CAUSES
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.measures.runtime_calls import WAITS
from warpwatch_diagnosis.rules import RULES
from warpwatch_diagnosis.rules.base import Capture, Confidence, Finding, RankRule, idle
from warpwatch_diagnosis.rules.communication_bound import exposed
from warpwatch_diagnosis.rules.serving import KvThrashRule
from warpwatch_diagnosis.rules.slower_compute import SlowerComputeRule
from warpwatch_diagnosis.rules.straggler import StragglerRule
from warpwatch_diagnosis.trace.files import TraceError
from warpwatch_diagnosis.words import listed, percent, short

# The findings that a kind of anomaly shows as; a straggler may show as any.
_SEEN_AS = {
    "data_stall": "data_loading",
    "comm_slow": "communication_bound",
    "gc_pause": "gc_pause",
    "kv_thrash": "kv_thrash",
    "latency_regression": "prefill_interference",
    **dict.fromkeys(("step_regression", "step_drift", "run_regression"), "slower_compute"),
}
_SURER: dict[Confidence, Confidence] = {"low": "medium", "medium": "high", "high": "high"}


@dataclass(frozen=True, slots=True)
class RequestingAnomaly:
    """The anomaly that the capture is of; ``ratio``: its time by the usual time."""

    kind: str
    rank: int | None = None
    begin_step: int | None = None
    ratio: float | None = None

    @property
    def what(self) -> str:
        of = "" if self.rank is None else f" of rank {self.rank}"
        since = "" if self.begin_step is None else f" since step {self.begin_step}"
        by = "" if self.ratio is None else f", {self.ratio:.2f} times as long as usual"
        return f"{self.kind.replace('_', ' ')}{of}{since}{by}"


def corroborated(findings: Iterable[Finding], anomaly: RequestingAnomaly | None) -> list[Finding]:
    """Put findings that the anomaly shows as first, with more confidence.

    The detector saw every step, the trace a few, so both together are surer than one.
    """
    if anomaly is None:
        return list(findings)
    sentence = f"the anomaly that requested the capture shows it, too: {anomaly.what}"
    ordered = sorted(findings, key=lambda f: not _is_same(f, anomaly))
    same = [
        replace(f, confidence=_SURER[f.confidence], evidence=(*f.evidence, sentence))
        for f in ordered
        if _is_same(f, anomaly)
    ]
    return same + ordered[len(same) :]


def _is_same(finding: Finding, anomaly: RequestingAnomaly) -> bool:
    same_rank = anomaly.rank is None or finding.rank == anomaly.rank
    if anomaly.kind == "straggler":
        return anomaly.rank is not None and same_rank
    return same_rank and _SEEN_AS.get(anomaly.kind) == finding.kind


# A share that rose by less than this against the baseline is as usual.
MIN_RISE = 0.02


def find(
    capture: Sequence[Measures],
    alignment: Alignment | None,
    baseline: Sequence[Measures],
    anomaly: RequestingAnomaly | None = None,
) -> list[Finding]:
    """Return findings by recoverable time, after those that the anomaly shows as."""
    found = [finding for rule in RULES for finding in rule.find(capture, alignment)]
    unnamed = anomaly is not None and anomaly.kind not in {f.kind for f in found}
    if anomaly and unnamed and anomaly.kind == StragglerRule.kind and anomaly.rank is not None:
        found += StragglerRule().of_suspect(capture, anomaly.rank)
    if anomaly and unnamed and anomaly.kind == KvThrashRule.kind:
        found += KvThrashRule().of_asked(capture)
    usual = {
        rule.kind: rule.usual_shares(baseline, alignment) if baseline else [] for rule in RULES
    }
    compared = [_against_baseline(f, usual[f.kind]) for f in _one_a_fault(found)]
    return corroborated(sorted(compared, key=lambda f: (-f.recoverable_s, f.kind)), anomaly)


def find_slower(
    capture: Sequence[Measures],
    slower: Sequence[BaselineComparison],
    anomaly: RequestingAnomaly | None,
) -> list[Finding]:
    """Return at most one finding, of steps that take longer than in the baseline."""
    found = SlowerComputeRule().against(capture, slower)
    return corroborated([_merged(found)], anomaly) if found else []


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
    also = listed([f"{f.label} {percent(f.share)}" for f in others])
    return replace(worst, evidence=(*worst.evidence, f"the same on other ranks: {also}"))


def _against_baseline(finding: Finding, usual_shares: list[float]) -> Finding:
    """Lower the confidence of a fault that the baseline has, too; only the surplus counts."""
    if not usual_shares or not finding.share:
        return finding
    usual = median(usual_shares)
    rise = finding.share - usual
    before = "it was so before: " if rise < MIN_RISE else ""
    return replace(
        finding,
        recoverable_s=finding.recoverable_s * max(0.0, rise / finding.share),
        confidence="low" if before else finding.confidence,
        evidence=(*finding.evidence, f"{before}the baseline has {percent(usual)}"),
    )


# No job has more ranks; the limit bounds the list of missing ones.
MAX_WORLD_SIZE = 1_000_000
# Idle time (TraceLens) and waiting for other ranks that no rule explains are reasons not to say
# healthy. Losses of several kinds, each too small for a rule, have the same limit together.
MAX_IDLE_SHARE = 0.15
MAX_LOST_SHARE = 0.15
MAX_UNEVEN_WAIT_SHARE = 0.10
MAX_CPU_WAIT_SHARE = 0.25
# Without steps the window begins with the GPU's first work. The fetching of the first batch is not
# in it, and work queued meanwhile may hide the next ones' (data_loading's limit for a CPU's work).
MAX_LOADING_SHARE = 0.10
_SHOWN = 8


def check_one_capture(capture: Capture) -> None:
    """Raise TraceError if two traces are of the same rank, or not of the same job."""
    reason = _repeated(capture) or _unlike(capture)
    if reason is not None:
        raise TraceError(f"these are not ranks of one capture: {reason}")


def _repeated(capture: Capture) -> str | None:
    # Without a rank, two traces are of the same one only if they are the same file.
    keys = [m.rank if m.rank is not None else (m.file, m.window) for m in capture]
    repeated = [key for key, count in Counter(keys).items() if count > 1]
    if not repeated:
        return None
    same = [m for m, key in zip(capture, keys, strict=True) if key == repeated[0]]
    files = listed([m.file for m in same])
    return f"{same[0].label} is there {len(same)} times ({files})"


def _unlike(capture: Capture) -> str | None:
    sizes = sorted({m.world_size for m in capture if m.world_size is not None})
    if len(sizes) > 1:
        return f"their world sizes differ ({listed([*map(str, sizes)])})"
    jobs = sorted({m.job for m in capture if m.job is not None})
    if len(jobs) > 1:
        return f"their jobs differ ({listed([job[:60] for job in jobs])})"
    return None


def _missing_ranks(capture: Capture, missing: Mapping[int, str]) -> str | None:
    """Return the ranks without a usable trace as the subject of a sentence, or None."""
    # The traces name the size of the job, or a process group of at most that size.
    sizes = [m.world_size or 0 for m in capture]
    sizes += [c.group_size or 0 for m in capture if m.gpu for c in m.gpu.collectives]
    world = max(sizes, default=0)
    here = {m.rank for m in capture}
    if None in here:
        absent = max(world - len(capture), len(missing))
        return f"the traces of {absent} of {max(world, absent)} ranks" if absent > 0 else None
    ranks = [rank for rank in range(min(world, MAX_WORLD_SIZE)) if rank not in here]
    ranks += sorted(rank for rank in missing if rank >= world and rank not in here)
    if not ranks:
        return None
    reasons = {rank: f" ({why})" for rank, why in missing.items() if why}
    named = ", ".join(f"{rank}{reasons.get(rank, '')}" for rank in ranks[:_SHOWN])
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"the trace{'s' * (len(ranks) > 1)} of rank {named}{more}"


def waits_for_missing(enough: Capture, missing: Mapping[int, str]) -> list[str]:
    """Return a sentence if a rank waits long and others are missing: the reason may be theirs.

    A single trace is evaluated alone unless other ranks are known to be missing.
    """
    worst = max(enough, key=_wait_share, default=None)
    if (
        worst is None
        or _wait_share(worst) <= _wait_limit(worst)
        or (len(enough) == 1 and not missing)
    ):
        return []
    absent = _missing_ranks(enough, missing)
    if absent is None:
        return []
    return [
        f"without {absent} the reason cannot be determined: {worst.label} waits "
        f"{percent(_wait_share(worst))} of the step for collectives, perhaps for a rank whose "
        "trace is not here"
    ]


def doubts(capture: Capture, enough: Capture, alignment: Alignment | None) -> Iterator[str]:
    """Yield sentences, the most informative first; ``enough`` has the ranks with enough events."""
    yield from (f"{m.label}: {m.shortage}" for m in capture if m.shortage)
    for m in enough:
        found = _on_gpu(m, m.gpu) if m.gpu else _on_cpu(m, alone=len(enough) == 1)
        yield from (f"{m.label}: {doubt}" for doubt in found)
    yield from _uneven(enough)
    if alignment is not None:
        yield from _by_turns(enough, alignment)
    for m in enough:
        if m.gpu is not None:
            yield from (f"{m.label}: {doubt}" for doubt in _several_losses(m, m.gpu))


def _wait_share(measures: Measures) -> float:
    return measures.share(exposed(measures))


def _wait_limit(measures: Measures) -> float:
    return MAX_UNEVEN_WAIT_SHARE if measures.gpu else MAX_CPU_WAIT_SHARE


def _on_gpu(measures: Measures, gpu: GpuTime) -> Iterator[str]:
    idle, loading = measures.share(gpu.idle), measures.share(measures.loading)
    if idle > MAX_IDLE_SHARE:
        cause = max(CAUSES, key=gpu.idle_time.total_us)
        reason = f"for several reasons, of which {cause.replace('_', ' ')} takes most"
        if cause in ("unexplained", "kernel_gap"):
            reason = "for no visible reason; record CUDA's synchronization events and stacks"
        yield f"the GPU is idle for {percent(idle)} of the step {reason}"
    if not measures.steps and loading > MAX_LOADING_SHARE:
        yield (
            f"fetching batches takes {percent(loading)} of the time, and whether the GPU waits for "
            "it is not sure without annotated steps; call profiler.step() in the loop"
        )


def _on_cpu(measures: Measures, alone: bool) -> Iterator[str]:
    share = _wait_share(measures)
    if alone and share > _wait_limit(measures):
        yield f"{percent(share)} of the step waits in collectives; the other ranks' traces say why"


def _uneven(measures: Capture) -> Iterator[str]:
    if len(measures) < 2:
        return
    least, *_, most = sorted(measures, key=_wait_share)
    gap = _wait_share(most) - _wait_share(least)
    # On the CPU the straggler's rule has already evaluated each step.
    if gap > _wait_limit(least):
        yield (
            f"{most.label} waits {percent(gap)} of the step more for collectives than {least.label}"
        )


def _by_turns(measures: Sequence[Measures], alignment: Alignment) -> Iterator[str]:
    """Yield a sentence if ranks wait long for each other and none is always the last."""
    waits = [
        (_wait_share(m) * m.window_us - alignment.exposed_transfer_us(m)) / m.window_us
        for m in measures
    ]
    if median(waits) > MAX_UNEVEN_WAIT_SHARE:
        yield (
            f"ranks wait {percent(median(waits))} of the step for each other by turns: the work of "
            "a step is uneven, as with sequences of different length"
        )


def _several_losses(measures: Measures, gpu: GpuTime) -> Iterator[str]:
    """Yield a sentence if idle time, exposed communication and copies are much together.

    The time that the device takes between two kernels does not count.
    """
    waits = exposed(measures)
    idle = difference(gpu.idle, gpu.idle_time.of("kernel_gap"))
    share = measures.share(union(idle + waits + gpu.exposed_transfers))
    if share <= MAX_LOST_SHARE:
        return
    parts = (
        ("idle time", difference(gpu.idle, waits)),
        ("exposed communication", waits),
        ("exposed copies", gpu.exposed_transfers),
    )
    named = ", ".join(f"{name} {percent(measures.share(us))}" for name, us in parts if us)
    yield (
        f"{percent(share)} of the step is lost for several reasons of which none stands out: "
        f"{named}"
    )


# More idle time without a visible reason (the limit of idle time that is not a finding) is put to
# the place of the host that takes most of it.
MAX_UNEXPLAINED_SHARE = 0.15
MIN_PLACE_SHARE = 0.50
# A kind that takes less of the step is not a candidate.
MIN_LIKELY_SHARE = 0.01
# If one kind has this share of the idle time, the idle time is of this kind.
MOST = 0.75
WITH_STACKS = "a capture with stacks (with_stack=True) names the lines"
# The loss of launch_bound is that of host_bound, and kernels that compute are not a loss.
_NO_CANDIDATES = frozenset({"launch_bound", "memory_bound"})
# The capture that would decide whether it is this kind.
_DECIDES = {
    "communication_bound": "the traces of all ranks of the same steps say who waits for whom",
    "straggler": "more steps of all ranks show whether it is always the same one",
    "data_loading": "a capture of more steps, from profiler.step() to profiler.step(), shows it",
    "transfer_bound": "a capture with pin_memory=True and non_blocking=True shows what copies cost",
    "memory_bound": "a capture with record_shapes=True places the kernels on the roofline",
    "allocator_thrash": "a capture with profile_memory=True shows the allocator",
}


def unexplained_share(capture: Sequence[Measures]) -> float:
    """Return the largest share of a rank, without the time from kernel to kernel."""
    return max((m.share(idle(m, "unexplained")) for m in capture), default=0.0)


def unexplained(capture: Sequence[Measures]) -> Iterator[Finding]:
    """Yield findings for unexplained idle time, by the event that the host was in meanwhile."""
    for m in capture:
        share = m.share(idle(m, "unexplained"))
        places = m.doing.get("unexplained", ())
        if share > MAX_UNEXPLAINED_SHARE and places:
            us = share * m.window_us
            if places[0].us >= MIN_PLACE_SHARE * us:
                yield _in_place(m, places[0].place, share, places[0].us)


def _in_place(measures: Measures, place: str, share: float, us: float) -> Finding:
    kind = "transfer_bound" if "Memcpy" in place or "Memset" in place else "host_bound"
    kind = "sync_bound" if WAITS.match(place) else kind
    rule = next(rule for rule in RULES if rule.kind == kind and isinstance(rule, RankRule))
    lines = measures.lines.get("unexplained", ())
    more = [f"lines that take it: {', '.join(line.place for line in lines)}"] if lines else []
    evidence = (
        f"the GPU is idle for {percent(share)} of the step for a reason that the trace does not "
        f"show, and {percent(us / (share * measures.window_us))} of it the host is in "
        f"{short(place)}",
        *more,
    )
    return rule.finding(
        measures, us / measures.window_us, us, "low", evidence, rule.advice(measures)
    )


def mostly(capture: Sequence[Measures]) -> Iterator[Finding]:
    """Yield the kind of most of the idle time, if it is much and no rule finds enough."""
    for m in capture:
        if m.gpu is None or m.share(m.gpu.idle) <= MAX_UNEXPLAINED_SHARE:
            continue
        rule, lost = max(_losses(m), key=lambda found: total(found[1]))
        if total(lost) > MOST * total(m.gpu.idle):
            yield replace(rule.finding_of(m, lost), confidence="low")


def likeliest(capture: Sequence[Measures], findings: Sequence[Finding]) -> tuple[str, str]:
    """Return a clause on the two kinds that take most, and the capture that would decide."""
    shares = {finding.kind: finding.share for finding in findings}
    for m in capture:
        for rule, lost in _losses(m):
            shares[rule.kind] = max(m.share(lost), shares.get(rule.kind, 0.0))
        # The transfer takes long, or another rank comes late.
        for kind in ("communication_bound", "straggler"):
            shares[kind] = max(m.share(exposed(m)), shares.get(kind, 0.0))
    ranked = sorted(shares, key=lambda kind: (-shares[kind], kind))[:2]
    named = [f"{k} ({percent(shares[k])})" for k in ranked if shares[k] >= MIN_LIKELY_SHARE]
    if not named:
        return "", ""
    return f"; likeliest: {' or '.join(named)}", _DECIDES.get(ranked[0], WITH_STACKS)


def _losses(measures: Measures) -> Iterator[tuple[RankRule, Intervals]]:
    for rule in RULES:
        if not isinstance(rule, RankRule) or rule.kind in _NO_CANDIDATES:
            continue
        if measures.gpu is not None or not rule.needs_gpu:
            yield rule, rule.lost(measures)
