"""*Inference server*: how long its users wait, what an iteration takes, and what holds it up."""

from __future__ import annotations

from warpwatch_dashboards import links, variables
from warpwatch_dashboards.page import Page, Row
from warpwatch_dashboards.panels import (
    EMPTY_WHEN_HEALTHY,
    Column,
    at_most,
    bars,
    graph,
    number,
    table,
)
from warpwatch_dashboards.queries import (
    BY_JOB,
    JOB,
    JOB_LEGEND,
    RANK_KEY,
    RANK_LEGEND,
    Query,
    rate,
    series,
    total,
)

# Above it, requests lose their place in the KV cache.
KV_CACHE = 0.9


def page() -> Page:
    return Page(
        uid=links.INFERENCE_SERVER,
        title="Warpwatch / Inference server",
        description="One served model over all its replicas: latencies, iterations, KV cache.",
        variables=[*variables.of_agents(), variables.namespace(), variables.job()],
        annotations=variables.marks_of_jobs(),
        rows=[_NOW_ROW, _LATENCY_ROW, _ITERATION_ROW, _LOAD_ROW, _REASONS_ROW],
    )


def _quantile(name: str, quantile: float) -> Query:
    buckets = total(f"le, {BY_JOB}", rate(series(f"serve_{name}_bucket", JOB)))
    legend = f"{JOB_LEGEND} p{100 * quantile:.0f}"
    return Query(f"histogram_quantile({quantile}, {buckets})", legend)


def _mean(name: str, by: str = BY_JOB) -> str:
    sums, counts = (total(by, rate(series(f"serve_{name}_{of}", JOB))) for of in ("sum", "count"))
    return f"{sums} / {counts}"


def _requests(state: str) -> str:
    return total(BY_JOB, series("serve_requests", JOB, f'state="{state}"'))


def _tokens(kind: str) -> str:
    return total(BY_JOB, rate(series("serve_tokens_total", JOB, f'kind="{kind}"')))


_PREEMPTED = total(BY_JOB, rate(series("serve_preemptions_total", JOB)))
_KV = f"max by ({BY_JOB}) ({series('serve_kv_cache_usage_ratio', JOB)})"
_CORE_WAIT = total(RANK_KEY, rate(series("rank_core_wait_seconds_total", JOB)))
_NOW_ROW = Row(
    "Now",
    [
        number("Running", "Requests that are served now.", Query(_requests("running"), JOB_LEGEND)),
        number(
            "Waiting",
            "Requests in the queue now. It should drain after a burst.",
            Query(_requests("waiting"), JOB_LEGEND),
        ),
        number(
            "KV cache",
            "Used share of the fullest replica's KV cache. Near 1 requests lose their place.",
            Query(_KV, JOB_LEGEND),
            unit="percentunit",
            limits=at_most(KV_CACHE),
        ),
        number(
            "Tokens",
            "Tokens that the server returns per second.",
            Query(_tokens("generated"), JOB_LEGEND),
            unit="si:tokens/s",
        ),
        number(
            "Time to first token",
            "Mean time from the arrival of a request to its first token.",
            Query(_mean("time_to_first_token_seconds"), JOB_LEGEND),
            unit="s",
        ),
        number(
            "Time between tokens",
            "Mean time from one token of a request to the next.",
            Query(_mean("inter_token_seconds"), JOB_LEGEND),
            unit="s",
        ),
    ],
)
_LATENCY_ROW = Row(
    "Latency",
    [
        graph(
            title,
            description,
            *(_quantile(name, quantile) for quantile in (0.5, 0.9, 0.99)),
            unit="s",
        )
        for title, description, name in (
            (
                "First token",
                "Time to the first token. It rises with the queue and with long prompts.",
                "time_to_first_token_seconds",
            ),
            (
                "Between tokens",
                "Time between two tokens. A high p99 over a low p50: prompts of others interrupt.",
                "inter_token_seconds",
            ),
            (
                "Queue",
                "Time until a request is scheduled. High at few running requests: the scheduler.",
                "queue_seconds",
            ),
        )
    ],
)
_ITERATION_ROW = Row(
    "Iterations",
    [
        graph(
            "Iteration by class",
            "Mean time of a pass of the engine by its work. It follows the load: compare like "
            "with like.",
            Query(
                _mean("iteration_duration_seconds", f"class, {BY_JOB}"),
                f"{JOB_LEGEND} {{{{class}}}}",
            ),
            unit="s",
        ),
        graph(
            "Iterations by rank",
            "Iterations per second. The ranks of one engine run in step.",
            Query(total(RANK_KEY, rate(series("steps_total", JOB))), RANK_LEGEND),
            unit="si:iterations/s",
        ),
        graph(
            "Where iterations' time goes",
            "Share of the time by phase: schedule, forward, sample; wait is for the scheduler, "
            "comm for other ranks.",
            Query(
                total(f"phase, {BY_JOB}", rate(series("phase_seconds_total", JOB))),
                f"{JOB_LEGEND} {{{{phase}}}}",
            ),
            stacked=True,
        ),
        graph(
            "Idle",
            "Share of time without a request in flight, by process. Much of it: fewer replicas "
            "would do.",
            Query(total(RANK_KEY, rate(series("serve_idle_seconds_total", JOB))), RANK_LEGEND),
            unit="percentunit",
        ),
        graph(
            "Waiting for a core",
            "Time that the server's processes wait for a core, per second. Engine and front end "
            "need cores of their own.",
            Query(_CORE_WAIT, RANK_LEGEND),
            unit="percentunit",
        ),
        graph(
            "GPU power",
            "What the server's GPUs draw. It falls where they wait.",
            Query(total(BY_JOB, rate(series("rank_energy_joules_total", JOB))), JOB_LEGEND),
            unit="watt",
        ),
    ],
)
_HITS = total(BY_JOB, rate(series("serve_prefix_tokens_total", JOB, 'hit="true"')))
_LOOKED_UP = total(BY_JOB, rate(series("serve_prefix_tokens_total", JOB)))
_LOAD_ROW = Row(
    "Load",
    [
        graph(
            "Requests",
            "Requests that are served, and that wait.",
            Query(_requests("running"), f"{JOB_LEGEND} running"),
            Query(_requests("waiting"), f"{JOB_LEGEND} waiting"),
        ),
        graph(
            "Tokens per second",
            "Tokens of prompts, computed or found in the prefix cache, and tokens returned.",
            Query(_tokens("prompt"), f"{JOB_LEGEND} prompt"),
            Query(_tokens("generated"), f"{JOB_LEGEND} generated"),
            unit="si:tokens/s",
        ),
        graph(
            "KV cache in use",
            "Used share of the fullest replica's KV cache.",
            Query(_KV, JOB_LEGEND),
            unit="percentunit",
            limits=at_most(KV_CACHE),
        ),
        graph(
            "Preemptions",
            "Requests per second that lose their place in the KV cache. What they had is "
            "computed again.",
            Query(_PREEMPTED, JOB_LEGEND),
            unit="reqps",
        ),
        graph(
            "Prefix cache",
            "Share of the prompts' tokens that the prefix cache had.",
            Query(f"{_HITS} / {_LOOKED_UP}", JOB_LEGEND),
            unit="percentunit",
        ),
        graph(
            "Processes",
            "Processes of the server that run: workers, schedulers and front ends.",
            Query(total(BY_JOB, series("rank_up", JOB)), JOB_LEGEND),
        ),
    ],
)
_SHARES = f"max by ({BY_JOB}, finding) ({series('diagnosis_share_ratio', JOB)})"
_REASONS_ROW = Row(
    "Why",
    [
        bars(
            "Newest diagnosis",
            "Share of the iterations that each finding of the newest capture explains. "
            f"{EMPTY_WHEN_HEALTHY}",
            Query(_SHARES, f"{JOB_LEGEND} {{{{finding}}}}"),
            unit="percentunit",
            minimum=0,
            maximum=1,
        ),
        table(
            "Anomalies now",
            "What is wrong with the server now. The agent's page has the evidence and the "
            f"capture. {EMPTY_WHEN_HEALTHY}",
            [Column(f"{series('anomaly_info', JOB)} == 1")],
            hidden=["__name__", "job", "gpu", "uuid", "link"],
            links=[links.node_of_row()],
            width=16,
        ),
    ],
)
