"""*Training job*: how fast it is, where its time goes, which rank holds it up, what it costs.

Most of its panels are the lines of job_panels.csv.
"""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as models

from warpwatch_dashboards import links, variables
from warpwatch_dashboards.page import Page, Row
from warpwatch_dashboards.panel_table import read_panels
from warpwatch_dashboards.panels import (
    Column,
    anomalies_now,
    at_least,
    graph,
    newest_diagnosis,
    table,
)
from warpwatch_dashboards.queries import (
    BY_JOB,
    JOB,
    JOB_LEGEND,
    PLACE,
    RANK_KEY,
    Query,
    mean_of_steps,
    quantile_of_steps,
    ranks_by_device,
    rate,
    series,
    share_of_time,
    total,
    workloads,
)


def page() -> Page:
    panels = read_panels("job_panels.csv", {"rank": JOB, "job": JOB})
    diagnosis = newest_diagnosis(
        "Share of the steps that each finding of the newest capture's diagnosis explains. "
        "The report, linked from the marks in the graphs, says what to do about it."
    )
    return Page(
        uid=links.TRAINING_JOB,
        title="Warpwatch / Training job",
        description="One job over all its nodes: speed, phases, stragglers, memory, energy.",
        variables=[
            *variables.of_agents(),
            variables.namespace(),
            variables.job(),
        ],
        annotations=variables.marks_of_jobs(),
        rows=[
            Row("Targets", panels["Targets"]),
            Row("Speed", [_step_time(), *panels["Speed"], _runs()]),
            Row("Where the time goes", [*_time(), *panels["Where the time goes"]]),
            Row("Ranks", [*panels["Ranks"], _where_ranks_run()]),
            Row("Memory", panels["Memory"]),
            Row("Energy", panels["Energy"]),
            Row("Why", [diagnosis, anomalies_now("job"), *panels["Why"]]),
        ],
    )


def _step_time() -> models.Panel:
    return graph(
        "Step time",
        "The mean over the steps of all ranks, and percentiles, which move from bucket to "
        "bucket. A mean that rises by a few per cent and stays is a regression; p99 alone "
        "rises with checkpoints, evaluation and lone slow steps.",
        Query(mean_of_steps(), f"{JOB_LEGEND} mean"),
        Query(quantile_of_steps(0.5), f"{JOB_LEGEND} p50"),
        Query(quantile_of_steps(0.99), f"{JOB_LEGEND} p99"),
        unit="s",
        width=12,
    )


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


def _runs() -> models.Panel:
    step_s = f"{_by_run('step_seconds_total')} / ({_by_run('steps_total')} > 0)"
    return table(
        "Runs",
        "The runs of the job in the time shown, to compare: mean step and tokens a second.",
        [
            Column(_over_time(step_s), "Mean step", "s"),
            Column(_over_time(_by_run("tokens_total")), "Tokens a second", "si:tokens/s"),
        ],
        width=24,
    )


_SPENT = rate(series("phase_seconds_total", JOB))
_COUNTED = total(BY_JOB, rate(series("step_duration_seconds_count", JOB)))
_WHOLE = total(BY_JOB, rate(series("step_duration_seconds_sum", JOB)))
_PHASES = f"{total(f'{BY_JOB}, phase', _SPENT)} / on ({BY_JOB}) group_left () {_COUNTED}"
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


def _time() -> list[models.Panel]:
    return [
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
    ]


def _where_ranks_run() -> models.Panel:
    key = f"{RANK_KEY}, host, local_rank, device, framework, step_clock"
    holders = workloads('namespace!=""')
    # If several share a GPU, it is unknown which is the rank's.
    pods = f"({holders} and on ({PLACE}, uuid) count by ({PLACE}, uuid) ({holders}) == 1)"
    owners = f"{ranks_by_device()} * on ({PLACE}, uuid) group_left (namespace, pod) {pods}"
    return table(
        "Where ranks run",
        "Each rank's node, GPU and pod (not where several pods share the GPU), the versions it "
        "runs on, and what ends a step of it (step_clock). Versions that differ between ranks are "
        "a fault of the image.",
        [
            Column(f"max by ({key}) ({series('rank_info', JOB)})"),
            Column(f"max by ({RANK_KEY}, namespace, pod) ({owners})"),
            Column(f"max by ({RANK_KEY}) ({series('rank_up', JOB)})", "Up", "none", at_least(1)),
        ],
        width=24,
        links=[links.node_of_row()],
    )
