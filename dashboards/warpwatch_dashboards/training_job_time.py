"""The rows of *Training job* about its steps: how long they take, and where their time goes."""

from __future__ import annotations

from warpwatch_dashboards.job_queries import (
    BY_JOB,
    JOB_LEGEND,
    STEPS_PER_SECOND,
    in_order,
    mean_of_steps,
    quantile_of_steps,
    share_of_time,
    step_s,
)
from warpwatch_dashboards.page import Row
from warpwatch_dashboards.panels import graph, heat_map
from warpwatch_dashboards.queries import (
    JOB,
    PLACE,
    RANK_KEY,
    RANK_LEGEND,
    Query,
    rate,
    series,
    total,
)
from warpwatch_dashboards.tables import Column, table

_NODE = f"{PLACE}, owner, training_job"
_FIRST_RANKS = series("rank_info", 'cluster=~"$cluster",training_job=~"$job"', 'rank="0"')


def _by_run(name: str) -> str:
    """Return a counter's rate over the ranks of each run.

    Without an id of its own a run is called otherwise on each node. All nodes of a job that have
    no rank 0 are of the run of the one that has it; each that has one runs by itself.
    """
    run = f"max by ({_NODE}, run) ({_FIRST_RANKS})"
    rates = total(_NODE, rate(series(name, JOB)))
    own = total(f"{BY_JOB}, run", f"{run} * on ({_NODE}) group_left () {rates}")
    others = total(BY_JOB, f"({rates} unless on ({_NODE}) {run})")
    elsewhere = f"max by ({BY_JOB}, run) ({run}) * on ({BY_JOB}) group_left () {others}"
    return f"({own} + on ({BY_JOB}) group_left () {others} or {own} or {elsewhere})"


def _over_time(expression: str) -> str:
    return f"avg_over_time(({expression})[$__range:$__interval])"


_RUN_STEP_S = f"{_by_run('step_seconds_total')} / ({_by_run('steps_total')} > 0)"
_RUN_TOKENS = _by_run("tokens_total")
_STEPS_ROW = Row(
    "Speed",
    [
        graph(
            "Step time",
            "The mean over the steps of all ranks, and percentiles, which move from bucket to "
            "bucket. A mean that rises by a few per cent and stays is a regression; p99 alone "
            "rises with checkpoints, evaluation and lone slow steps.",
            Query(mean_of_steps(), f"{JOB_LEGEND} mean"),
            Query(quantile_of_steps(0.5), f"{JOB_LEGEND} p50"),
            Query(quantile_of_steps(0.99), f"{JOB_LEGEND} p99"),
            unit="s",
            width=12,
        ),
        heat_map(
            "Step time by rank",
            "Mean step time of each rank. In synchronous training all ranks change together: who "
            "is the cause is seen in their own time, below.",
            Query(in_order(step_s()), RANK_LEGEND),
            unit="s",
            width=12,
        ),
        graph(
            "Steps",
            "Steps a second. 0 is a hang, a long checkpoint or an evaluation.",
            Query(STEPS_PER_SECOND, JOB_LEGEND),
            unit="si:steps/s",
        ),
        graph(
            "Samples",
            "Samples a second over all ranks, of jobs that tell them.",
            Query(total(BY_JOB, rate(series("samples_total", JOB))), JOB_LEGEND),
            unit="si:samples/s",
        ),
        graph(
            "Tokens",
            "Tokens a second over all ranks, of jobs that tell them: the rate to compare runs by.",
            Query(total(BY_JOB, rate(series("tokens_total", JOB))), JOB_LEGEND),
            unit="si:tokens/s",
        ),
        table(
            "Runs",
            "The runs of the job in the time shown, to compare: mean step and tokens a second.",
            [
                Column(_over_time(_RUN_STEP_S), "Mean step", "s"),
                Column(_over_time(_RUN_TOKENS), "Tokens a second", "si:tokens/s"),
            ],
            width=24,
        ),
    ],
)


_BY_PHASE = f"{BY_JOB}, phase"
_SPENT = rate(series("phase_seconds_total", JOB))
_COUNTED = total(BY_JOB, rate(series("step_duration_seconds_count", JOB)))
_WHOLE = total(BY_JOB, rate(series("step_duration_seconds_sum", JOB)))
_PHASES = f"{total(_BY_PHASE, _SPENT)} / on ({BY_JOB}) group_left () {_COUNTED}"
_COLLECTING = total(RANK_KEY, rate(series("rank_gc_seconds_total", JOB)))
_OTHER = f"({_WHOLE} - {total(BY_JOB, _SPENT)}) / {_COUNTED}"
_GOOD, _SLOW, _DOWN, _PAUSES = (
    share_of_time(rule)
    for rule in (
        *("goodput:ratio_rate10m", "slow_steps:share_rate10m", "ranks_down:share10m"),
        "pauses:share_rate10m",
    )
)
_SLOW_OR_NONE = f"({_SLOW} or {_GOOD} * 0)"
_PAUSED = f"(sum by ({BY_JOB}) ({_PAUSES}) or {_GOOD} * 0)"
_LOST = f"clamp_min(1 - ({_GOOD}) - {_PAUSED} - ({_DOWN}), 0)"
_PHASES_ROW = Row(
    "Where the time goes",
    [
        graph(
            "Where the ranks' time went",
            "Goodput and what is missing from it: slow steps (beyond those of the job's fastest "
            "quarter), waiting for data, checkpoints, evaluation, ranks that were down (crashes, "
            "restarts), and time without a step (hangs, starts). Needs the recording rules.",
            Query(f"({_GOOD}) - {_SLOW_OR_NONE}", f"{JOB_LEGEND} productive"),
            Query(_SLOW_OR_NONE, f"{JOB_LEGEND} slow steps"),
            Query(_PAUSES, f"{JOB_LEGEND} {{{{phase}}}}"),
            Query(_DOWN, f"{JOB_LEGEND} down"),
            Query(_LOST, f"{JOB_LEGEND} no step"),
            unit="percentunit",
            stacked=True,
            maximum=1,
            width=24,
        ),
        graph(
            "Phases of a step",
            "Seconds of a mean step by phase, one upon the other; other is what no phase tells. "
            "The phase that grew with the step time is where to look.",
            Query(_PHASES, f"{JOB_LEGEND} {{{{phase}}}}"),
            Query(_OTHER, f"{JOB_LEGEND} other"),
            unit="s",
            stacked=True,
            width=16,
        ),
        graph(
            "Garbage collection",
            "Share of time in Python's garbage collector, the ten ranks with the most. Ranks that "
            "collect at different times make all others wait: collect on all at the same step.",
            Query(f"topk(10, {_COLLECTING})", RANK_LEGEND),
            unit="percentunit",
        ),
    ],
)


TIME_ROWS = [_STEPS_ROW, _PHASES_ROW]
