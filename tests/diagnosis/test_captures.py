"""Verdicts on made captures: one fault or none, missing ranks, baselines, pipelines, doubts.

The golden file of each has all that the diagnosis says, without the numbers of single traces.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest

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
from warpwatch_diagnosis.__main__ import main
from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.findings import RequestingAnomaly
from warpwatch_diagnosis.trace.files import TraceError

WORLD = 8
SYNCHRONIZE = "cudaStreamSynchronize"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
PINNED = "Memcpy HtoD (Pinned -> Device)"
COMPILING = "entire_frame_compile (dynamo_timed)"
RAILS = {rank: f"gpu-{1 + rank // 4}" for rank in range(8)}
NODES = {0: "gpu-1", 1: "gpu-1", 2: "gpu-2", 3: "gpu-2"}


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
OF_NO_RANK = RequestingAnomaly("straggler")
OF_RANK_0 = RequestingAnomaly("straggler", rank=0, begin_step=0)
WAITS, WAITS_LESS = ([cpu_rank(0, waiting_us=us), cpu_rank(1, waiting_us=9)] for us in (3750, 1500))
HOST_BOUND = [cpu_rank(0, host_us=4000)]
PLACES = ([0, 3], [0, 0], [True, 2], "first", None, [5, 2])
Case = tuple[tuple[TraceFile, ...], dict[str, Any]]


def case(*ranks: TraceFile, **known: Any) -> Case:
    """The ranks, and what is known besides; a baseline is traces, too."""
    return ranks, known


# By verdict and name.
CAPTURES: dict[str, dict[str, Case]] = {
    "inconclusive": {
        "losses that are each too small for a rule are not healthy together":
            case(gpu_steps(idle=1400, exposed=990, copies=490)),
        "without the trace of the culprit": case(*WITHOUT_THE_CULPRIT),
        "without the trace of the culprit, which did not answer":
            case(*WITHOUT_THE_CULPRIT, missing={7: "no_answer"}),
        "one trace where more were asked for":
            case(WITHOUT_THE_CULPRIT[0], missing=dict.fromkeys(range(1, 10), "gone")),
        "two of 12 ranks wait": case(*(cpu_rank(k, waiting_us=3000, world=12) for k in (1, 2))),
        "ranks that are last by turns": case(*recommenders(True, True, turns=True)),
        "a rank that was late before the capture and is not": case(*WAITS_LESS, anomaly=OF_RANK_0),
        "preempted requests of what is no server":
            case(cpu_rank(0), anomaly=RequestingAnomaly("kv_thrash")),
        "a finding that is less than what is unexplained":
            case(unexplained(event("gpu_memcpy", PINNED, 2000, 800, 7))),
        "idle time that is mostly outside of an annotation":
            case(unexplained(event("user_annotation", "env.step", 1900, 2500))),
        "slow loading without steps":
            case(without_steps(stepped(loading(2000), kernel(0, STEP_US, -50), steps=99))),
        "idle time of several kinds":
            case(stepped(loading(490, kind="MultiProcessing"), kernel(1700, 8300, 1690)),
                 anomaly=OF_NO_RANK),
        "idle time from one kernel to the next":
            case(stepped(*(kernel(20 * k, 12, -50) for k in range(500)))),
        "idle time that no late launch explains":
            case(stepped(*(kernel(200 * k, 100, -50) for k in range(50)))),
        "a part of the ranks": case(*one_late()[:2]),
        "ranks that are late by turns": case(*late_by_turns()),
        "missing ranks where communication is blamed":
            case(*(rank_trace(k, late_us=2900, transfer_us=4000) for k in range(2))),
        "ranks without common collectives": case(rank_trace(0), rank_trace(1, name="broadcast")),
        "the same without nodes": case(*slow_node()),
        "a step that is slower around its operators":
            case(slower(cpu_rank(0, host_us=1200), 1.15), baseline=[cpu_rank(0)]),
        **{f"stages at {at}": case(*stages([6000, 500], True, pipeline=at)) for at in PLACES},
        "launches without GPU events":
            case(stepped(operator(0, 5000), event("cuda_runtime", "cudaLaunchKernel", 10, 5),
                         event("cuda_runtime", "cudaMalloc", 20, 5)), baseline=[cpu_rank(0)]),
    },
    "healthy": {
        "small losses are beside the time from kernel to kernel":
            case(stepped(*(kernel(100 * k, 92, -50) for k in range(90)),
                         kernel(9050, 950, -50, NCCL))),
        "small losses are": case(gpu_steps(idle=400, exposed=500, copies=200)),
        "two of two ranks wait": case(*(cpu_rank(k, waiting_us=3000, world=2) for k in (0, 1))),
        "ranks hardly wait for a missing one":
            case(*(cpu_rank(k, waiting_us=500, world=2) for k in (0, 1)), missing={2: "gone"}),
        "ranks that are last by turns on the CPU": case(*recommenders(False, True, turns=True)),
        "the last one for 9.4 % of the step": case(*recommenders(False, False, part=0.36)),
        "a rank that is hardly slower": case(*WAITS_LESS),
        "a baseline that is of no use":
            case(cpu_rank(0), baseline=[stepped(operator(0, 9000), steps=1)]),
        "a baseline without steps":
            case(cpu_rank(0), baseline=[graph_breaks_without_steps()]),
        "a rare pause of a rank alone": case(pausing(0)),
        "operators that changed": case(sorting(cpu_rank(0)), baseline=[cpu_rank(0)]),
        "ranks against themselves":
            case(cpu_rank(0), cpu_rank(1, host_us=1000), baseline=[cpu_rank(1), cpu_rank(0)]),
        "even stages on the GPU": case(*stages([500, 600], True)),
        "even stages on the CPU": case(*stages([500, 600], False)),
        "collectives of which one in five ends together": case(*at_other_times(1000, 5)),
        "collectives of which two in four end together": case(*at_other_times(800, 4)),
        "a busy GPU": case(stepped(kernel(0, STEP_US, -50))),
        # Compiled code without events of its own counts as operators.
        "a busy CPU": case(stepped(operator(0, STEP_US, "Torch-Compiled Region: 0/0"))),
        "a CPU that is busy for the most": case(stepped(operator(0, 9500))),
        "memory from the driver once is growth": case(with_one(
            (event("cuda_runtime", "cudaMalloc", 10, 3000, 77), kernel(3020, 6980, 3015)),
            kernel(20, 9980, 15),
        )),
    },
    "straggler": {
        **{
            f"rank {rank} of eight is late on the {where}": case(*late(rank, where == "GPU"))
            for rank in (0, 5) for where in ("GPU", "CPU")
        },
        "the last one to every collective of one step": case(*recommenders(True, True)),
        "the last one to every collective without annotations": case(*recommenders(True, False)),
        "the last one to every collective on the CPU": case(*recommenders(False, False)),
        "the last one for 10.4 % of the step": case(*recommenders(False, False, part=0.4)),
        "a slower rank": case(*WAITS),
        "a slower rank that the anomaly named": case(*WAITS, anomaly=STRAGGLER),
        "a slower rank where the anomaly named another": case(*WAITS, anomaly=OF_RANK_0),
        "a rank that is hardly slower and was late before the capture":
            case(*WAITS_LESS, anomaly=STRAGGLER),
        "a late rank": case(*one_late()),
        "only steps that ranks have in common":
            case(rank_trace(0, first_step=5, clock_us=77), *one_late()[1:]),
        "a slow node whose ranks are late by turns": case(*slow_node(), nodes=NODES),
        # Ranks 0 and 1 are the first stage. The second, with the head, computes longer.
        "a rank that was late is compared with its own stage": case(
            *(stage(n // 2, 2, us, False) for n, us in enumerate([4000, 5000, 500, 500])),
            anomaly=OF_RANK_0,
        ),
    },
    "communication_bound": {
        "two of three stages": case(*(stage(n, 3, 4000, True) for n in (0, 1))),
        "one trace alone": case(WITHOUT_THE_CULPRIT[0]),
        "transfers that got longer are compared with transfers": case(
            *(rank_trace(k, transfer_us=4000, late_us=3000) for k in range(4)),
            baseline=[rank_trace(k, transfer_us=500, late_us=2900 * (k == 0)) for k in range(4)],
        ),
        "ranks with clocks of their own": case(
            *(rank_trace(k, clock_us=us) for k, us in ((1, 250_000), (0, 0), (3, 40), (2, -1_700)))
        ),
        **{
            f"ranks with {name}": case(*(rank_trace(k, name=name) for k in range(RANKS)))
            for name in ("all_gather_into_tensor", "broadcast")
        },
        "ranks that all transfer": case(
            *(rank_trace(k, late_us=2900 + 30 * k, transfer_us=4000) for k in range(RANKS))
        ),
        "steps with different numbers of collectives": case(*one_more_collective()),
        **{
            f"a rail with transfers of {us} µs":
                case(*rails(us), nodes=nodes)
            for us, nodes in ((5000, RAILS), (1500, RAILS), (5001, None))
        },
        "the most time to win back comes first": case(stepped(
            loading(1500), kernel(1550, 4000, 1520),
            kernel(5550, 4000, 1530, "ncclDevKernel_AllReduce"),
            event("cuda_runtime", "cudaDeviceSynchronize", 1540, 8020),
        )),
    },
    "host_bound": {
        "what was so before": case(*HOST_BOUND, baseline=HOST_BOUND),
        "idle time in an annotation":
            case(unexplained(event("user_annotation", "env.step", 1900, 6100))),
        "idle time that is mostly of one kind":
            case(stepped(loading(300, kind="MultiProcessing"), kernel(1700, 8300, 1690))),
        "kernels that are new, gone and more": case(
            busy_trace(extra="triton_poi_fused", count=12),
            baseline=[busy_trace(extra="old_kernel")],
        ),
        "a kernel that is too short to be listed is not gone":
            case(many_kernels(25, k03=1, k07=1), baseline=[many_kernels(25, k07=1, k09=1)]),
        "kernels of runs with different numbers of steps": case(
            many_kernels(18, new=250, short=150), baseline=[many_kernels(19, steps=2, old=200)]
        ),
        "nothing changed": case(busy_trace(), baseline=[busy_trace()]),
        "kernels that are fewer": case(busy_trace(count=9), baseline=[busy_trace()]),
        "a CPU against a GPU": case(busy_trace(), baseline=[cpu_rank(0)]),
        "an annotated checkpoint of one step": case(with_one(
            (event("user_annotation", "checkpoint", 0, 3000), operator(3000, 7000)),
            operator(3000, 7000),
        )),
        "one step is enough and less sure": case(cpu_rank(0, host_us=4000, steps=1)),
    },
    "slower_compute": {
        "a slower step with what was so before":
            case(slower(cpu_rank(0, host_us=4000), 1.5), baseline=HOST_BOUND),
        "kernels that are all slower alike": case(busy_trace(factor=1.2), baseline=[busy_trace()]),
        "kernels that are slower on two ranks":
            case(busy_trace(factor=1.2), busy_trace(factor=1.3), baseline=[busy_trace()]),
        "one slower kernel": case(slower_products(), baseline=[busy_trace()]),
    },
    "data_loading": {
        "what is new beside what was so before":
            case(cpu_rank(0, host_us=4100, loading_us=2500), baseline=HOST_BOUND),
        "new loading and a straggler of no rank":
            case(busy_trace(loading_us=3000), baseline=[busy_trace()], anomaly=OF_NO_RANK),
    },
    "gc_pause": {"a rare pause of one of two ranks": case(pausing(0), cpu_rank(1, steps=600))},
    "transfer_bound": {
        "idle time in a copy":
            case(unexplained(event("cuda_runtime", "cudaMemcpyAsync", 1950, 5500))),
    },
    "sync_bound": {
        "idle time in a wait": case(unexplained(event("cuda_runtime", SYNCHRONIZE, 1950, 6000))),
    },
    "pipeline_bubble": {
        "a bubble on the GPU":
            case(*stages([4000, 4000], True), baseline=stages([1500, 1500], True)),
        "a bubble on the CPU": case(*stages([4000, 4000], False)),
    },
    "stage_imbalance": {
        # The third stage has two ranks; the one that computes longer is named.
        f"an uneven stage on the {where}":
            case(*stages([6000, 6000, 500, 6000], where == "GPU"), stage(2, 4, 900, where == "GPU"),
                 baseline=stages([5000, 5000, 500, 2000], where == "GPU"))
        for where in ("GPU", "CPU")
    },
    "recompilation": {
        "compiling once may be the start": case(with_one(
            (operator(0, 4000, COMPILING), operator(4000, 6000)), operator(0, STEP_US)
        )),
        "compiling once for another shape": case(with_one(
            (operator(0, 4000, COMPILING), operator(4000, 6000, "Torch-Compiled Region: 0/1")),
            operator(0, STEP_US),
        )),
        "graph breaks without steps": case(graph_breaks_without_steps()),
    },
}  # fmt: skip
VERDICTS = {name: verdict for verdict, cases in CAPTURES.items() for name in cases}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_capture_has_its_verdict_and_all_that_is_said_of_it(tmp_path, name, golden_case):
    ranks, known = CAPTURES[VERDICTS[name]][name]
    if "baseline" in known:
        known = known | {"baseline": written(tmp_path, *known["baseline"], name="before")}
    found = diagnosed(tmp_path, *ranks, **known)
    document = found.to_json()
    del document["traces"]
    golden_case(json.dumps(document, indent=1))
    assert found.verdict == VERDICTS[name]


def test_each_file_is_announced_before_it_is_read(tmp_path):
    seen: list[tuple[int, int, str]] = []
    before = written(tmp_path, cpu_rank(0), name="b")
    known = {"baseline": before, "reading": lambda *file: seen.append(file)}
    diagnosed(tmp_path, cpu_rank(0), cpu_rank(1), **known)
    assert seen == [(0, 3, "rank0.json"), (1, 3, "rank1.json"), (2, 3, "b0.json"), (3, 3, "")]


def test_a_rank_twice_is_no_capture(tmp_path, capsys):
    paths = written(tmp_path, cpu_rank(0), cpu_rank(0), name="r")
    assert main([str(path) for path in paths]) == 2
    said = capsys.readouterr().err
    assert "these are not ranks of one capture: rank 0 is there 2 times (r0.json, r1.json)" in said
    path = stepped(operator(0, 3000)).write(tmp_path / "one.json")
    with pytest.raises(TraceError, match=r"one\.json is there 2 times"):
        diagnose([path, path])


def test_ranks_of_different_jobs_are_no_capture(tmp_path):
    with pytest.raises(TraceError, match=r"their world sizes differ \(2, 4\)"):
        diagnosed(tmp_path, cpu_rank(0), cpu_rank(1, world=4))
    one, other = cpu_rank(0), cpu_rank(1)
    one.head["warpwatch"], other.head["warpwatch"] = {"job": "a"}, {"job": "b"}
    with pytest.raises(TraceError, match=r"their jobs differ \(a, b\)"):
        diagnosed(tmp_path, one, other)
