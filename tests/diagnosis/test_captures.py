"""Verdicts on made captures: one fault or none, missing ranks, baselines, pipelines, doubts.

Captures whose traces are one call each are in captures.yaml.

The golden file of each has all that the diagnosis says, without the numbers of single traces.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.cases import cases
from tests.diagnosis.captures import (
    Part,
    diagnosed,
    event,
    kernel,
    loading,
    operator,
    stepped,
    without_steps,
    written,
)
from tests.diagnosis.traces import LATEST_US, RANKS, STEP_US, TraceFile, cpu_rank, rank_trace
from warpwatch_diagnosis.findings import RequestingAnomaly

WORLD = 8
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
PINNED = "Memcpy HtoD (Pinned -> Device)"
RAILS = {rank: f"gpu-{1 + rank // 4}" for rank in range(8)}


def gpu_steps(*, idle: int, exposed: int, copies: int) -> TraceFile:
    """Each step: a copy, idle time, a product, then a collective; shares in µs of 10 ms."""
    at = copies + idle
    computed = STEP_US - at - exposed
    return stepped(
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 0, copies, 7),
        kernel(at, computed, at - 5, "sm80_xmma_gemm"),
        kernel(at + computed, exposed, 0, NCCL),
    )


def unexplained(*parts: Part) -> TraceFile:
    """Idle for 60 % of the step although the work is queued."""
    return stepped(kernel(0, 2000, 0), kernel(8000, 1000, 20), kernel(9000, 1000, 20), *parts)


def late(culprit: int, on_gpu: bool) -> list[TraceFile]:
    return [
        rank_trace(k, late_us=LATEST_US * (k == culprit), steps=1, world=WORLD)
        if on_gpu
        else cpu_rank(k, waiting_us=4000 * (k != culprit), steps=1, world=WORLD)
        for k in range(WORLD)
    ]


# Seven ranks that all wait for the eighth: each has the same long collective.
WITHOUT_THE_CULPRIT = [
    rank_trace(k, transfer_us=3000, late_us=LATEST_US, world=WORLD) for k in range(WORLD - 1)
]
# Waits of the ranks of a recommender in its collectives, by how large their embedding tables are.
SHARES = (0.48, 0.31, 0.14, 0.25, 0.40, 0.22, 0.35, 0.05)
EXCHANGES = ("all_to_all", "all_to_all", "all_reduce") * 2


def recommender(rank: int, turns: bool, on_gpu: bool, annotated: bool, part: float) -> TraceFile:
    """One step of 60 ms: work before each exchange, for whose last rank the others wait.

    An all-to-all on the GPU has only the kernel of its sends and receives in the trace.
    """
    backend = "nccl" if on_gpu else "gloo"
    trace = TraceFile(steps=0, distributedInfo={"backend": backend, "rank": rank, "world_size": 8})
    trace.annotation("ProfilerStep#12", 0, 60_000)
    for number, name in enumerate(EXCHANGES):
        begin, end = 10_000 * number, 10_000 * (number + 1)
        at = end - 10_000 * part * SHARES[(rank + number * turns) % 8]
        if on_gpu:
            trace.kernel(begin, at - begin, begin, name="gemm")
            kernel = "AllReduce_RING_LL_Sum_float" if name == "all_reduce" else "SendRecv_RING"
            # Tables of uneven size end the exchange at uneven times.
            took = end - at + (0 if name == "all_reduce" else 100 * rank * annotated)
            if annotated:
                trace.annotation(f"nccl:{name}", begin + 100, 50)
            trace.kernel(at, took, begin + 110, name=f"ncclKernel_{kernel}(ncclWorkElem)")
        else:
            trace.operator(begin, at - begin)
            trace.annotation(f"gloo:{name}", at, end - at, tid=99)
            trace.annotation("gloo:barrier", begin, 40, tid=97)
            if rank < 4:
                trace.annotation("gloo:gather", begin, 500 * (4 - rank), tid=98)
    return trace


def recommenders(
    on_gpu: bool, annotated: bool, turns: bool = False, part: float = 1.0
) -> list[TraceFile]:
    return [recommender(rank, turns, on_gpu, annotated, part) for rank in range(8)]


def slower(trace: TraceFile, factor: float) -> TraceFile:
    origin = trace.events[0]["ts"]
    for recorded in trace.events:
        recorded["dur"] *= factor
        recorded["ts"] = origin + (recorded["ts"] - origin) * factor
    return trace


# --- ranks that meet in collectives -----------------------------------------------------------


def one_late() -> list[TraceFile]:
    return [rank_trace(k, late_us=LATEST_US if k == 2 else 0) for k in range(RANKS)]


def late_by_turns() -> list[TraceFile]:
    ranks = [rank_trace(k) for k in range(RANKS)]
    for step, trace in enumerate(ranks):
        kernels = [e for e in trace.events if e["cat"] == "kernel"]
        gemm, collective, *_ = [e for e in kernels if int(e["ts"] // STEP_US) % 4 == step]
        gemm["dur"] += LATEST_US
        collective["ts"] += LATEST_US
        collective["dur"] -= LATEST_US
    return ranks


def one_more_collective() -> list[TraceFile]:
    ranks = [rank_trace(k) for k in range(RANKS)]
    extra = next(e for e in ranks[1].events if e["name"].startswith("nccl"))
    ranks[1].events.append(extra | {"ts": extra["ts"] - 1500, "dur": 100})
    return ranks


def at_other_times(apart_us: int, steps: int) -> list[TraceFile]:
    """Two ranks; the second's collectives end earlier from step to step."""
    ranks = [rank_trace(rank, late_us=LATEST_US, steps=steps) for rank in (0, 1)]
    collectives = [one for one in ranks[1].events if one["name"].startswith("nccl")]
    for step, collective in enumerate(collectives):
        collective["ts"] -= apart_us * step
    return ranks


def slow_node() -> list[TraceFile]:
    """Ranks 2 and 3 are late by turns: each brings half of the lateness."""
    ranks = [rank_trace(rank) for rank in range(RANKS)]
    for rank in (2, 3):
        other = rank_trace(rank, late_us=LATEST_US)
        ranks[rank].events = [
            (other if (step % 2) == rank - 2 else ranks[rank]).events[step * 6 + number]
            for step in range(4)
            for number in range(6)
        ]
    return ranks


def synchronized(rank: int) -> TraceFile:
    """Every rank waits for its device in each step; what rank 2 then does takes 3 ms longer."""
    at = 3100 + LATEST_US * (rank == 2)
    return stepped(
        kernel(0, 3000, -50),
        event("cuda_runtime", "cudaStreamSynchronize", 100, 2910),
        kernel(at, 500, at - 5),
        event("kernel", NCCL, at + 500, 9000 - at, 20, **{"Collective name": "allreduce"}),
    )


def chained(rank: int) -> TraceFile:
    """Each rank shares a group with the next one only, and has a clock of its own."""
    groups = [number for number in (0, 1) if rank - number in (0, 1)]
    shared = (
        event(
            "kernel", NCCL, 6000 + 2000 * number + 700 * rank, 1000, 20,
            **{"Collective name": "allreduce", "Process Group Name": number, "Group size": 2},
        )
        for number in groups
    )  # fmt: skip
    return stepped(kernel(0, 5000, -50), *shared)


def sometimes_slower() -> list[TraceFile]:
    """Rank 1 is slower than the other one in three of four steps."""
    ranks = [cpu_rank(0, waiting_us=3750), cpu_rank(1, waiting_us=9)]
    ranks[0].events[4:7] = cpu_rank(0).events[4:7]
    return ranks


def rails(slow_us: int) -> list[TraceFile]:
    """Eight ranks; rank k and k + 4 share a rail, each a group of its own."""
    traces = [rank_trace(rank, transfer_us=slow_us if rank % 4 == 3 else 1500) for rank in range(8)]
    for rank, trace in enumerate(traces):
        for given in (one.get("args", {}) for one in trace.events):
            if "Group size" in given:
                given |= {"Group size": 2, "Process Group Name": f"rail{rank % 4}"}
    return traces


# --- what changed since a baseline ------------------------------------------------------------


def busy_trace(
    *, factor: float = 1.0, loading_us: int = 0, extra: str | None = None, count: int = 10
) -> TraceFile:
    """Four steps: ``count`` products and ten pointwise kernels back to back, ``factor`` slower."""
    parts, at = [loading(loading_us)] if loading_us else [], float(loading_us)
    for name in ["gemm"] * count + ["elementwise"] * 10 + ([extra] if extra else []):
        us = factor * (500 if name == "gemm" else 100)
        parts.append(kernel(at, us, max(0, at - 50), name))
        at += us
    # The last kernel hides it.
    return stepped(*parts, event("gpu_memcpy", PINNED, at - 90, 50, 21))


def many_kernels(count: int, steps: int = 4, **others: int) -> TraceFile:
    """Kernels of 300 µs each, and others by name and µs: 20 are listed."""
    us = {f"k{k:02}": 300 for k in range(count)} | others
    parts = (kernel(300 * k, us[name], 0, name) for k, name in enumerate(us))
    return stepped(*parts, steps=steps)


def slower_products() -> TraceFile:
    trace = busy_trace()
    for one in trace.events:
        one["dur"] *= 1.3 if one["name"] == "gemm" else 1
    return trace


def sorting(rank: TraceFile) -> TraceFile:
    for begin in rank.each_step():
        rank.operator(begin + 1000, 4000, name="aten::sort")
    return rank


# --- pipelines ---------------------------------------------------------------------------------


def stage(number: int, of: int, waits_us: int, on_gpu: bool, **place: object) -> TraceFile:
    """Steps that compute, and wait ``waits_us`` for what another stage hands over."""
    name = "ncclDevKernel_SendRecv(ncclDevKernelArgs)"
    parts = (
        [
            kernel(waits_us, STEP_US - 300 - waits_us, 0),
            kernel(0, waits_us + 200, -20, name),
            kernel(STEP_US - 300, 300, 0, NCCL),
        ]
        if on_gpu
        else [
            loading(200, at=waits_us),
            operator(waits_us + 200, STEP_US - waits_us - 200),
            event("user_annotation", "gloo:recv", 0, waits_us, tid=99),
        ]
    )
    return stepped(*parts, warpwatch={"parallel": {"pipeline": [number, of]} | place})


def stages(waits_us: list[int], on_gpu: bool, **place: object) -> list[TraceFile]:
    return [stage(n, len(waits_us), us, on_gpu, **place) for n, us in enumerate(waits_us)]


# --- single traces -----------------------------------------------------------------------------


def with_one(first: Sequence[Part], *rest: Part) -> TraceFile:
    """``first`` in the first step, ``rest`` in the following ones."""
    trace = stepped()
    for begin in trace.each_step():
        for add in rest if begin else first:
            add(trace, begin)
    return trace


def graph_breaks_without_steps() -> TraceFile:
    trace = TraceFile(steps=0)
    for k in range(200):
        trace.operator(500 * k, 500, name=f"Torch-Compiled Region: {k % 4}/0")
        trace.operator(500 * k, 100, name="TorchDynamo Cache Lookup")
        trace.operator(500 * k + 100, 400)
    return trace


def pausing(rank: int) -> TraceFile:
    """Six seconds, of which a collection of garbage takes 0.9 %."""
    trace = cpu_rank(rank, steps=600)
    trace.event("python_function", "Python GC", 100, 55_000, 77)
    return trace


STRAGGLER = RequestingAnomaly("straggler", rank=1, begin_step=412, ratio=1.6)
OF_RANK_0 = RequestingAnomaly("straggler", rank=0, begin_step=0)
WAITS, WAITS_LESS = ([cpu_rank(0, waiting_us=us), cpu_rank(1, waiting_us=9)] for us in (3750, 1500))
PLACES = ([0, 3], [0, 0], [True, 2], "first", None, [5, 2])
Case = tuple[tuple[TraceFile, ...], dict[str, Any]]


def case(*ranks: TraceFile, **known: Any) -> Case:
    """The ranks, and what is known besides; a baseline is traces, too."""
    return ranks, known


# By verdict and name.
CAPTURES: dict[str, dict[str, Case]] = {
    "inconclusive": {
        "without the trace of the culprit": case(*WITHOUT_THE_CULPRIT),
        "without the trace of the culprit, which did not answer":
            case(*WITHOUT_THE_CULPRIT, missing={7: "no_answer"}),
        "one trace where more were asked for":
            case(WITHOUT_THE_CULPRIT[0], missing=dict.fromkeys(range(1, 10), "gone")),
        "a rank that was late before the capture and is not": case(*WAITS_LESS, anomaly=OF_RANK_0),
        "idle time from one kernel to the next":
            case(stepped(*(kernel(20 * k, 12, -50) for k in range(500)))),
        "idle time that no late launch explains":
            case(stepped(*(kernel(200 * k, 100, -50) for k in range(50)))),
        **{f"stages at {at}": case(*stages([6000, 500], True, pipeline=at)) for at in PLACES},
    },
    "healthy": {
        "small losses are beside the time from kernel to kernel":
            case(stepped(*(kernel(100 * k, 92, -50) for k in range(90)),
                         kernel(9050, 950, -50, NCCL))),
        "a rank that is hardly slower": case(*WAITS_LESS),
    },
    "straggler": {
        **{
            f"rank {rank} of eight is late on the {where}": case(*late(rank, where == "GPU"))
            for rank in (0, 5) for where in ("GPU", "CPU")
        },
        "a slower rank": case(*WAITS),
        "a slower rank that the anomaly named": case(*WAITS, anomaly=STRAGGLER),
        "a slower rank where the anomaly named another": case(*WAITS, anomaly=OF_RANK_0),
        "a rank that is hardly slower and was late before the capture":
            case(*WAITS_LESS, anomaly=STRAGGLER),
        "only steps that ranks have in common":
            case(rank_trace(0, first_step=5, clock_us=77), *one_late()[1:]),
    },
    "communication_bound": {
        "one trace alone": case(WITHOUT_THE_CULPRIT[0]),
        "transfers that got longer are compared with transfers": case(
            *(rank_trace(k, transfer_us=4000, late_us=3000) for k in range(4)),
            baseline=[rank_trace(k, transfer_us=500, late_us=2900 * (k == 0)) for k in range(4)],
        ),
        **{
            f"ranks with {name}": case(*(rank_trace(k, name=name) for k in range(RANKS)))
            for name in ("all_gather_into_tensor", "broadcast")
        },
        **{
            f"a rail with transfers of {us} µs":
                case(*rails(us), nodes=nodes)
            for us, nodes in ((5000, RAILS), (1500, RAILS), (5001, None))
        },
    },
    "stage_imbalance": {
        # The third stage has two ranks; the one that computes longer is named.
        f"an uneven stage on the {where}":
            case(*stages([6000, 6000, 500, 6000], where == "GPU"), stage(2, 4, 900, where == "GPU"),
                 baseline=stages([5000, 5000, 500, 2000], where == "GPU"))
        for where in ("GPU", "CPU")
    },
}  # fmt: skip
BUILDERS: dict[str, Callable[..., Any]] = {
    builder.__name__: builder
    for builder in (
        at_other_times, busy_trace, chained, cpu_rank, event, gpu_steps, graph_breaks_without_steps,
        kernel, late_by_turns, loading, many_kernels, one_late, one_more_collective, operator,
        pausing, rank_trace, recommenders, RequestingAnomaly, slow_node, slower, slower_products,
        sometimes_slower, sorting, stage, stages, stepped, synchronized, unexplained, with_one,
        without_steps,
    )
}  # fmt: skip


def built(value: Any) -> Any:
    """Return what the calls of captures.yaml make."""
    if isinstance(value, list):
        return [built(one) for one in value]
    if not isinstance(value, dict):
        return value
    (name, given), *named = value.items()
    known = {key: built(one) for key, one in named}
    return BUILDERS[name](*built(given), **known) if name in BUILDERS else {name: given, **known}


TABLES = cases(__file__)
VERDICTS = {
    name: verdict for made in (CAPTURES, TABLES) for verdict in made for name in made[verdict]
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_capture_has_its_verdict_and_all_that_is_said_of_it(tmp_path, name, golden_case):
    verdict = VERDICTS[name]
    if name in TABLES.get(verdict, ()):
        known = {key: built(value) for key, value in TABLES[verdict][name].items()}
        ranks = known.pop("ranks")
    else:
        ranks, known = CAPTURES[verdict][name]
    if "baseline" in known:
        known = known | {"baseline": written(tmp_path, *known["baseline"], name="before")}
    found = diagnosed(tmp_path, *ranks, **known)
    document = found.to_json()
    del document["traces"]
    golden_case(json.dumps(document, indent=1))
    assert found.verdict == verdict
