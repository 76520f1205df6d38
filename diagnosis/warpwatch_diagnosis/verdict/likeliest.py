"""Names a cause if no rule is sure: the place of the host, or the two likeliest kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from warpwatch_diagnosis.measures.intervals import Intervals, total
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.measures.runtime_calls import waits_by_name
from warpwatch_diagnosis.rules import RULES
from warpwatch_diagnosis.rules.base import Finding, RankRule, idle, percent, short
from warpwatch_diagnosis.rules.communication_bound import exposed

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
    kind = "sync_bound" if waits_by_name(place) else kind
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
    """Yield the loss of a rank to each kind of fault."""
    for rule in RULES:
        if not isinstance(rule, RankRule) or rule.kind in _NO_CANDIDATES:
            continue
        if measures.gpu is not None or not rule.needs_gpu:
            yield rule, rule.lost(measures)
