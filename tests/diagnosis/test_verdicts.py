"""When a verdict is given, when it is a doubt, and what is no capture at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnosis.traces import LATEST_US, LOADER, STEP_US, TraceFile, cpu_rank, rank_trace
from warpwatch_diagnosis.__main__ import main
from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.trace.errors import TraceError

WORLD = 8
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def written(folder: Path, *ranks: TraceFile, name: str = "r") -> list[Path]:
    return [trace.write(folder / f"{name}{k}.json") for k, trace in enumerate(ranks)]


def gpu_step(trace: TraceFile, *, idle: int, exposed: int, copies: int) -> TraceFile:
    """Each step: a copy, idle time, a product, then a collective; shares in µs of 10 ms."""
    for begin in trace.each_step():
        trace.event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", begin, copies, 7)
        at = begin + copies + idle
        computed = STEP_US - copies - idle - exposed
        trace.kernel(at, computed, at - 5 if idle else begin, name="sm80_xmma_gemm")
        trace.kernel(at + computed, exposed, begin, name=NCCL)
    return trace


def test_losses_that_are_each_too_small_for_a_rule_are_not_healthy_together(tmp_path: Path) -> None:
    trace = gpu_step(TraceFile(), idle=1400, exposed=990, copies=490)
    found = diagnose(written(tmp_path, trace))
    assert (found.verdict, found.findings) == ("inconclusive", ())
    assert found.summary == (
        "r0.json: 29 % of the step is lost for several reasons of which none stands out: "
        "idle time 14 %, exposed communication 10 %, exposed copies 4.9 %; likeliest: host_bound "
        "(14 %) or communication_bound (10 %); a capture with stacks (with_stack=True) names the "
        "lines"
    )


def test_small_losses_are_healthy(tmp_path: Path) -> None:
    trace = gpu_step(TraceFile(), idle=400, exposed=500, copies=200)
    assert diagnose(written(tmp_path, trace)).verdict == "healthy"


def without_the_culprit() -> list[TraceFile]:
    """Seven ranks that all wait for the eighth: each has the same long collective."""
    ranks = [rank_trace(k, transfer_us=3000, late_us=LATEST_US) for k in range(WORLD - 1)]
    for trace in ranks:
        trace.head["distributedInfo"]["world_size"] = WORLD
    return ranks


def test_without_the_culprits_trace_nothing_is_concluded(tmp_path: Path) -> None:
    paths = written(tmp_path, *without_the_culprit())
    found = diagnose(paths)
    assert found.verdict == "inconclusive"
    assert found.summary.startswith(
        "without the trace of rank 7 the reason cannot be determined: rank "
    )
    assert [(f.kind, f.confidence) for f in found.findings] == [("communication_bound", "low")]
    found = diagnose(paths, missing={7: "no_answer"})
    assert found.summary.startswith("without the trace of rank 7 (no_answer) the reason")


def test_one_trace_alone_is_judged_unless_others_were_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, without_the_culprit()[0])
    assert diagnose(path).verdict == "communication_bound"
    missing = {rank: "gone" for rank in range(1, WORLD)}
    assert diagnose(path, missing=missing).verdict == "inconclusive"


def test_cpu_ranks_that_wait_for_a_missing_one_are_inconclusive(tmp_path: Path) -> None:
    ranks = [cpu_rank(k, waiting_us=3000) for k in range(2)]
    assert diagnose(written(tmp_path, *ranks)).verdict == "healthy"
    for trace in ranks:
        trace.head["distributedInfo"]["world_size"] = 4
    found = diagnose(written(tmp_path, *ranks))
    assert found.verdict == "inconclusive"
    assert "without the traces of rank 2, 3 the reason cannot be determined" in found.summary


def test_missing_ranks_that_no_rank_waits_for_do_not_matter(tmp_path: Path) -> None:
    ranks = [cpu_rank(k, waiting_us=500) for k in range(2)]
    assert diagnose(written(tmp_path, *ranks), missing={2: "gone"}).verdict == "healthy"


def test_the_same_rank_twice_is_no_capture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = written(tmp_path, cpu_rank(0), cpu_rank(0))
    assert main([str(path) for path in paths]) == 2
    said = capsys.readouterr().err
    assert "these are not ranks of one capture: rank 0 is there 2 times (r0.json, r1.json)" in said
    unranked = TraceFile()
    unranked.operator(0, 3000)
    path = unranked.write(tmp_path / "one.json")
    with pytest.raises(TraceError, match=r"one\.json is there 2 times"):
        diagnose([path, path])


def test_ranks_of_different_jobs_are_no_capture(tmp_path: Path) -> None:
    one, other = cpu_rank(0), cpu_rank(1)
    other.head["distributedInfo"]["world_size"] = 4
    with pytest.raises(TraceError, match=r"their world sizes differ \(2, 4\)"):
        diagnose(written(tmp_path, one, other))
    other.head["distributedInfo"]["world_size"] = 2
    one.head["warpwatch"], other.head["warpwatch"] = {"job": "a"}, {"job": "b"}
    with pytest.raises(TraceError, match=r"their jobs differ \(a, b\)"):
        diagnose(written(tmp_path, one, other))


def slower(trace: TraceFile, factor: float) -> TraceFile:
    for event in trace.events:
        event["dur"] *= factor
        event["ts"] = trace.events[0]["ts"] + (event["ts"] - trace.events[0]["ts"]) * factor
    return trace


def test_what_was_so_before_does_not_explain_a_slower_step(tmp_path: Path) -> None:
    before = written(tmp_path, cpu_rank(0, host_us=4000), name="before")
    same = diagnose(before, baseline=before)
    assert (same.verdict, same.findings[0].confidence) == ("host_bound", "low")
    assert same.findings[0].recoverable_s == 0
    now = written(tmp_path, slower(cpu_rank(0, host_us=4000), 1.5), name="now")
    found = diagnose(now, baseline=before)
    assert (found.verdict, found.findings[0].confidence) == ("inconclusive", "low")
    assert found.summary.startswith("rank 0: a step takes 15.0 ms, in the baseline 10.0 ms")


def test_a_baseline_that_is_of_no_use_is_reported(tmp_path: Path) -> None:
    short = TraceFile(steps=1)
    short.operator(0, 9000)
    found = diagnose(
        written(tmp_path, cpu_rank(0)), baseline=written(tmp_path, short, name="before")
    )
    assert found.verdict == "healthy"
    assert found.summary.endswith("; the baseline cannot be compared: only 1 step was recorded")


def one_late(transfer_us: float) -> list[TraceFile]:
    """Four ranks of which one is late: the others' kernels are transfer and waiting."""
    return [rank_trace(k, transfer_us=transfer_us, late_us=2900 * (k == 0)) for k in range(4)]


def test_transfers_are_compared_with_transfers(tmp_path: Path) -> None:
    before = written(tmp_path, *one_late(500), name="before")
    now = written(tmp_path, *(rank_trace(k, transfer_us=4000, late_us=3000) for k in range(4)))
    finding = next(
        f for f in diagnose(now, baseline=before).findings if f.kind == "communication_bound"
    )
    assert finding.confidence == "high"
    assert finding.evidence[-1] == "the baseline has 6.0 %"


@pytest.mark.parametrize(("waited_for", "verdict"), [(True, "data_loading"), (False, "host_bound")])
def test_a_prefetchers_loading_counts_where_the_training_waits_for_it(
    tmp_path: Path, waited_for: bool, verdict: str
) -> None:
    trace = TraceFile()
    for begin in trace.each_step():
        trace.annotation(LOADER, begin + (0 if waited_for else 3000), 4000, tid=99)
        trace.operator(begin + 4000, STEP_US - 4000)
    found = diagnose(written(tmp_path, trace))
    assert [f.kind for f in found.findings] == [verdict]
    assert found.findings[0].share == pytest.approx(0.4)


def test_a_checkpoint_that_fills_the_window_is_one(tmp_path: Path) -> None:
    trace = TraceFile()
    for begin in trace.each_step():
        trace.annotation("save_checkpoint", begin, STEP_US)
        trace.operator(begin, STEP_US)
    found = diagnose(written(tmp_path, trace))
    assert found.verdict == "checkpoint"
    assert "4 of 4 captured steps save and do nothing else" in found.findings[0].evidence


def test_graph_breaks_are_reported_without_steps(tmp_path: Path) -> None:
    trace = TraceFile(steps=0)
    for k in range(200):
        trace.operator(500 * k, 500, name=f"Torch-Compiled Region: {k % 4}/0")
        trace.operator(500 * k, 100, name="TorchDynamo Cache Lookup")
        trace.operator(500 * k + 100, 400, name="aten::mm")
    found = diagnose(written(tmp_path, trace))
    assert found.verdict == "recompilation"
    assert "the trace calls 200 compiled regions of 4 functions" in found.findings[0].evidence[1]
