"""Jobs and their ranks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from warpwatch_daemon.http.page.charts import (
    PhaseShare,
    StepChart,
    ceiling_s,
    phase_shares,
    phases_label,
    step_chart,
)
from warpwatch_daemon.quantities import (
    NO_VALUE,
    joules,
    percent,
    plural,
    rate,
    seconds,
    text,
)
from warpwatch_telemetry.state import JobState, RankState, State

MAX_JOBS = 20
MAX_RANKS = 32
# What is said of a rank without a heartbeat, by its silent_reason.
SILENCE = {
    "stopped": "stopped by a signal, a debugger or a frozen container",
    "holds the GIL": "a C call holds the GIL: no other thread runs",
}
# What the numbers beside a chart are taken of: the newest steps.
RECENT_STEPS = 20


@dataclass(frozen=True, slots=True)
class RankView:
    name: str
    status: str
    where: str
    clock: str
    silence: str
    step: str
    newest: str
    median: str
    rates: tuple[str, ...]
    chart: StepChart | None
    phases: tuple[PhaseShare, ...]
    phases_label: str


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """``share``: of the ranks' time, on average."""

    name: str
    colour: int
    share: str


@dataclass(frozen=True, slots=True)
class JobView:
    name: str
    facts: tuple[str, ...]
    ranks: tuple[RankView, ...]
    more_ranks: int
    scale_top: str
    legend: tuple[LegendEntry, ...]


def job_views(state: State) -> tuple[JobView, ...]:
    """The first MAX_JOBS jobs: those that run come first."""
    members: dict[str, list[RankState]] = {}
    for rank in state.ranks:
        members.setdefault(rank.job, []).append(rank)
    gpus = {sample.device.uuid: f"GPU {sample.device.index}" for sample in state.devices}
    jobs = sorted(state.jobs, key=lambda job: not _runs(members.get(job.name, [])))
    return tuple(
        _job_view(job, members.get(job.name, []), gpus, _marks(state, job.name))
        for job in jobs[:MAX_JOBS]
    )


def _job_view(
    job: JobState, ranks: Sequence[RankState], gpus: Mapping[str, str], marks: Sequence[int]
) -> JobView:
    shown = ranks[:MAX_RANKS]
    top_s = ceiling_s([rank.recent_s for rank in shown])
    views = tuple(_rank_view(rank, gpus, top_s, marks) for rank in shown)
    return JobView(
        name=text(job.name),
        facts=_facts(job, ranks),
        ranks=views,
        scale_top=seconds(top_s),
        more_ranks=len(ranks) - len(shown),
        legend=_legend(views),
    )


def _rank_view(
    rank: RankState, gpus: Mapping[str, str], top_s: float, marks: Sequence[int]
) -> RankView:
    recent = rank.recent_s[-RECENT_STEPS:]
    phases = phase_shares(rank.phases_s, rank.durations.sum)
    gpu = gpus.get(rank.device or "")
    return RankView(
        name=text(rank.name, 24),
        status=text(rank.status, 24),
        where=" · ".join(part for part in (gpu, text(rank.host, 40)) if part),
        clock=f"step clock: {text(rank.step_clock, 24)}" if rank.step_clock else "",
        silence=SILENCE.get(rank.silent_reason or "", ""),
        step=NO_VALUE if rank.step is None else str(rank.step),
        newest=seconds(recent[-1] if recent else None),
        median=seconds(statistics.median(recent) if recent else None),
        rates=tuple(
            rate(per_s, what)
            for per_s, what in ((rank.samples_per_s, "samples"), (rank.tokens_per_s, "tokens"))
            if per_s
        ),
        chart=step_chart(rank.recent_s, top_s, newest_step=rank.step, marks=marks),
        phases=phases,
        phases_label=phases_label(phases),
    )


def _legend(ranks: Sequence[RankView]) -> tuple[LegendEntry, ...]:
    widths: dict[tuple[int, str], float] = {}
    for rank in ranks:
        for share in rank.phases:
            key = (share.colour, share.name)
            widths[key] = widths.get(key, 0.0) + share.width
    drawn = sum(1 for rank in ranks if rank.phases)
    return tuple(
        LegendEntry(name, colour, percent(width / drawn / 100))
        for (colour, name), width in sorted(widths.items())
    )


def _facts(job: JobState, ranks: Sequence[RankState]) -> tuple[str, ...]:
    running = [rank for rank in ranks if rank.status == "running" and rank.recent_s]
    facts = [
        plural(len(ranks), "rank")
        + (f" of {job.world_size}" if job.world_size > len(ranks) else "")
    ]
    if running:
        # Ranks step together, so a job is as fast as one of them, and its input adds up.
        steps_per_s = statistics.median(_steps_per_s(rank) for rank in running)
        facts.append(rate(steps_per_s, "steps"))
        # What no rank reports is not shown.
        samples_per_s = sum(rank.samples_per_s or 0.0 for rank in running)
        tokens_per_s = sum(rank.tokens_per_s or 0.0 for rank in running)
        facts.extend([rate(samples_per_s, "samples")] if samples_per_s else [])
        facts.extend([rate(tokens_per_s, "tokens")] if tokens_per_s else [])
    if job.energy_j:
        facts.append(joules(job.energy_j))
    return tuple(facts)


def _steps_per_s(rank: RankState) -> float:
    step_s = statistics.fmean(rank.recent_s[-RECENT_STEPS:])
    return 1 / step_s if step_s > 0 else 0.0


def _marks(state: State, job: str) -> list[int]:
    """The steps since which something is wrong."""
    return [
        anomaly.begin_step
        for anomaly in state.anomalies
        if anomaly.job == job and anomaly.end_time is None and anomaly.begin_step is not None
    ]


def _runs(ranks: Sequence[RankState]) -> bool:
    return any(rank.status == "running" for rank in ranks)
