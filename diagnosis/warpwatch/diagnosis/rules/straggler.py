"""One rank keeps the others waiting: its steps are longer without the waiting for collectives.

Only for captures of several CPU ranks today: there the wait of the training thread is in the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from warpwatch.diagnosis.cpu_time import CpuTime
from warpwatch.diagnosis.intervals import Interval, Intervals, clip, total
from warpwatch.diagnosis.measures import Measures
from warpwatch.diagnosis.rules.base import Finding, milliseconds, percent

# Healthy peers differ by up to 14 % (PRISM, 2510.15596); cores shared with others by more.
MIN_LOCAL_RATIO = 1.25
# Operators that merely run slower on one rank are mostly cores shared with somebody for a moment.
MIN_OPERATOR_RATIO = 2.0
# By how much of the window the others must wait longer than the culprit (our own value).
MIN_WAIT_EXCESS = 0.10
# A cause is there in (nearly) every step; noise changes sides.
MIN_STEPS = 3
MIN_CONSISTENCY = 0.80
HIGH_RATIO = 1.5
# The parts of a step, as the evidence names them.
LOADING, OPERATORS, HOST = "data loading", "operators", "Python between the operators"


@dataclass(frozen=True, slots=True)
class _Rank:
    """Time of each step in µs: without waiting, and of it in loader, operators and host."""

    measures: Measures
    local_us: list[float]
    parts_us: dict[str, float]


class Straggler:
    kind = "straggler"
    supersedes: tuple[str, ...] = ("host_bound",)

    def share(self, measures: Measures) -> float | None:
        return None

    def find(self, capture: Sequence[Measures]) -> list[Finding]:
        ranks = [_rank(m, m.cpu) for m in capture if m.cpu is not None and m.steps]
        if len(ranks) < 2 or len(ranks) < len(capture):
            return []
        culprit = max(ranks, key=lambda r: median(r.local_us))
        others = [r for r in ranks if r is not culprit]
        if not _lags(culprit, others):
            return []
        finding = _finding(self.kind, culprit, others)
        return [] if finding is None else [finding]


def _rank(measures: Measures, cpu: CpuTime) -> _Rank:
    def of_step(intervals: Intervals, step: Interval) -> float:
        return total(clip(intervals, step))

    def a_step(intervals: Intervals) -> float:
        return median(of_step(intervals, step) for step in measures.steps)

    return _Rank(
        measures=measures,
        local_us=[
            end - begin - of_step(cpu.waiting, (begin, end)) for begin, end in measures.steps
        ],
        parts_us={
            LOADING: a_step(measures.loading),
            OPERATORS: a_step(cpu.operators),
            HOST: a_step(cpu.host),
        },
    )


def _lags(culprit: _Rank, others: list[_Rank]) -> bool:
    steps = min(len(r.local_us) for r in (culprit, *others))
    if steps < MIN_STEPS:
        return False
    typical = median(median(r.local_us) for r in others)
    slower = sum(culprit.local_us[i] > max(r.local_us[i] for r in others) for i in range(steps))
    waits = min(_wait_share(r) for r in others) - _wait_share(culprit)
    return (
        median(culprit.local_us) > MIN_LOCAL_RATIO * typical
        and slower >= MIN_CONSISTENCY * steps
        and waits > MIN_WAIT_EXCESS
    )


def _wait_share(rank: _Rank) -> float:
    cpu = rank.measures.cpu
    return rank.measures.share(cpu.waiting) if cpu else 0.0


def _finding(kind: str, culprit: _Rank, others: list[_Rank]) -> Finding | None:
    """None where the surplus is data loading: the earlier cause has a rule of its own."""
    usual = {part: median(r.parts_us[part] for r in others) for part in culprit.parts_us}
    surplus = {part: us - usual[part] for part, us in culprit.parts_us.items()}
    part = max(surplus, key=lambda name: surplus[name])
    own, typical = median(culprit.local_us), median(median(r.local_us) for r in others)
    if part == LOADING or (part == OPERATORS and own < MIN_OPERATOR_RATIO * typical):
        return None
    measures = culprit.measures
    lost_us = (own - typical) * len(measures.steps)
    share = min(1.0, lost_us / measures.window_us)
    return Finding(
        kind=kind,
        rank=measures.rank,
        label=measures.label,
        share=share,
        recoverable_s=lost_us / 1e6,
        confidence="high" if own > HIGH_RATIO * typical else "medium",
        evidence=(
            f"{measures.label} keeps the others waiting: without waiting its step takes "
            f"{milliseconds(own)}, theirs {milliseconds(typical)}",
            f"the difference is {part}: {milliseconds(culprit.parts_us[part])} a step against "
            f"{milliseconds(usual[part])}",
            f"the others wait {percent(min(_wait_share(r) for r in others))} of the time or more "
            f"for collectives, {measures.label} {percent(_wait_share(culprit))}",
        ),
        advice=(
            f"Look at what {measures.label} alone does (rank-dependent code, logging, validation, "
            "a larger share of the data) and at its machine: load, clocks, throttling."
        ),
    )
