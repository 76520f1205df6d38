"""Verdicts, doubts and the likeliest causes, and files that do not make a capture."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.diagnosis.captures import (
    Part,
    diagnosed,
    event,
    kernel,
    loading,
    operator,
    stepped,
    written,
)
from tests.diagnosis.traces import LATEST_US, STEP_US, TraceFile, cpu_rank, rank_trace
from warpwatch_diagnosis.__main__ import main
from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.trace.files import TraceError
from warpwatch_diagnosis.verdict.findings import Asked

WORLD = 8
SYNCHRONIZE = "cudaStreamSynchronize"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def gpu_steps(*, idle: int, exposed: int, copies: int) -> TraceFile:
    """Each step: a copy, idle time, a product, then a collective; shares in µs of 10 ms."""
    at = copies + idle
    computed = STEP_US - at - exposed
    return stepped(
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 0, copies, 7),
        kernel(at, computed, at - 5, "sm80_xmma_gemm"),
        kernel(at + computed, exposed, 0, NCCL),
    )


def test_losses_that_are_each_too_small_for_a_rule_are_not_healthy_together(tmp_path):
    found = diagnose(written(tmp_path, gpu_steps(idle=1400, exposed=990, copies=490), name="r"))
    assert (found.verdict, found.findings) == ("inconclusive", ())
    assert found.summary == (
        "r0.json: 29 % of the step is lost for several reasons of which none stands out: "
        "idle time 14 %, exposed communication 10 %, exposed copies 4.9 %; likeliest: host_bound "
        "(14 %) or communication_bound (10 %); a capture with stacks (with_stack=True) names the "
        "lines"
    )
    few = gpu_steps(idle=400, exposed=500, copies=200)
    assert diagnosed(tmp_path, few).verdict == "healthy"


def without_the_culprit() -> list[TraceFile]:
    """Seven ranks that all wait for the eighth: each has the same long collective."""
    return [
        rank_trace(k, transfer_us=3000, late_us=LATEST_US, world=WORLD) for k in range(WORLD - 1)
    ]


def test_without_the_culprits_trace_nothing_is_concluded(tmp_path):
    paths = written(tmp_path, *without_the_culprit())
    found = diagnose(paths)
    assert found.verdict == "inconclusive"
    assert found.summary.startswith(
        "without the trace of rank 7 the reason cannot be determined: rank "
    )
    assert [(f.kind, f.confidence) for f in found.findings] == [("communication_bound", "low")]
    found = diagnose(paths, missing={7: "no_answer"})
    assert found.summary.startswith("without the trace of rank 7 (no_answer) the reason")


def test_one_trace_alone_is_judged_unless_others_were_asked_for(tmp_path):
    path = written(tmp_path, without_the_culprit()[0])
    assert diagnose(path).verdict == "communication_bound"
    missing = {rank: "gone" for rank in range(1, WORLD)}
    assert diagnose(path, missing=missing).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("waiting_us", "world", "missing", "verdict"),
    [
        (3000, 2, {}, "healthy"),
        (3000, 4, {}, "inconclusive"),
        # No rank waits long enough for a missing one.
        (500, 2, {2: "gone"}, "healthy"),
    ],
)
def test_missing_ranks_matter_if_the_others_wait(tmp_path, waiting_us, world, missing, verdict):
    ranks = [cpu_rank(world // 4 + k, waiting_us=waiting_us, world=world) for k in range(2)]
    found = diagnosed(tmp_path, *ranks, missing=missing)
    assert found.verdict == verdict
    named = "without the traces of rank 0, 3 the reason cannot be determined" in found.summary
    assert named == (verdict == "inconclusive")


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


@pytest.mark.parametrize("culprit", [0, 5])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_of_eight_ranks_the_late_one_is_named(tmp_path, culprit, on_gpu):
    late = [k == culprit for k in range(WORLD)]
    ranks = [
        rank_trace(k, late_us=LATEST_US * is_late, steps=1, world=WORLD)
        if on_gpu
        else cpu_rank(k, waiting_us=4000 * (not is_late), steps=1, world=WORLD)
        for k, is_late in enumerate(late)
    ]
    found = diagnosed(tmp_path, *ranks)
    assert (found.verdict, found.findings[0].rank) == ("straggler", culprit)
    assert found.findings[0].confidence == ("medium" if on_gpu else "low")
    assert found.findings[0].evidence[-1] == "only 1 step was recorded"


# Waits of the ranks of a recommender in its collectives, by how large their embedding tables are.
SHARES = (0.48, 0.31, 0.14, 0.25, 0.40, 0.22, 0.35, 0.05)
EXCHANGES = ("all_to_all", "all_to_all", "all_reduce") * 2


def recommender(rank: int, waits: Sequence[float], on_gpu: bool, annotated: bool) -> TraceFile:
    """One step of 60 ms: work before each exchange, for whose last rank the others wait.

    An all-to-all on the GPU has only the kernel of its sends and receives in the trace.
    """
    backend = "nccl" if on_gpu else "gloo"
    trace = TraceFile(steps=0, distributedInfo={"backend": backend, "rank": rank, "world_size": 8})
    trace.annotation("ProfilerStep#12", 0, 60_000)
    for number, (name, wait) in enumerate(zip(EXCHANGES, waits, strict=True)):
        begin, end = 10_000 * number, 10_000 * (number + 1)
        at = end - 10_000 * wait
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
    return trace


@pytest.mark.parametrize(("on_gpu", "annotated"), [(True, True), (True, False), (False, False)])
def test_of_one_step_the_rank_is_named_that_is_last_to_every_collective(
    tmp_path, on_gpu, annotated
):
    ranks = [
        recommender(rank, [share] * len(EXCHANGES), on_gpu, annotated)
        for rank, share in enumerate(SHARES)
    ]
    found = diagnosed(tmp_path, *ranks)
    (finding,) = [finding for finding in found.findings if finding.kind == "straggler"]
    assert (finding.rank, finding.confidence, found.verdict) == (7, "medium", "straggler")
    assert ("6 of 6" in " ".join(finding.evidence), finding.share > 0.2) == (True, True)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_ranks_that_are_last_by_turns_are_not_named(tmp_path, on_gpu):
    ranks = [
        recommender(rank, [SHARES[(rank + turn) % 8] for turn in range(6)], on_gpu, annotated=True)
        for rank in range(8)
    ]
    assert [f for f in diagnosed(tmp_path, *ranks).findings if f.kind == "straggler"] == []


def slower_rank(folder: Path, waiting_us: int) -> list[Path]:
    return written(folder, cpu_rank(0, waiting_us=waiting_us), cpu_rank(1))


def test_the_anomaly_that_asked_makes_it_surer_and_names_who_it_saw(tmp_path):
    paths = slower_rank(tmp_path, 3750)
    asked = Asked("straggler", rank=1, begin_step=412, ratio=1.6)
    (finding,) = diagnose(paths, asked=asked).findings
    assert (finding.kind, finding.rank, finding.confidence) == ("straggler", 1, "medium")
    assert finding.evidence[-1] == (
        "the anomaly that asked saw it too: straggler of rank 1 since step 412, "
        "1.60 times as long as usual"
    )
    for other in (None, Asked("straggler", rank=0)):
        (finding,) = diagnose(paths, asked=other).findings
        assert (finding.rank, finding.confidence) == (1, "low")


def test_of_a_rank_that_was_late_before_the_capture_less_is_enough(tmp_path):
    paths = slower_rank(tmp_path, 1500)
    assert diagnose(paths).verdict == "healthy"
    found = diagnose(paths, asked=Asked("straggler", rank=1, begin_step=412, ratio=1.2))
    assert (found.verdict, found.findings[0].rank) == ("straggler", 1)
    gone = diagnose(paths, asked=Asked("straggler", rank=0))
    assert gone.verdict == "inconclusive"
    assert gone.summary.startswith("the captured steps do not show straggler of rank 0; likeliest")


def slower(trace: TraceFile, factor: float) -> TraceFile:
    origin = trace.events[0]["ts"]
    for recorded in trace.events:
        recorded["dur"] *= factor
        recorded["ts"] = origin + (recorded["ts"] - origin) * factor
    return trace


def test_what_was_so_before_does_not_explain_a_slower_step(tmp_path):
    before = written(tmp_path, cpu_rank(0, host_us=4000), name="before")
    same = diagnose(before, baseline=before)
    assert (same.verdict, same.findings[0].confidence) == ("host_bound", "low")
    assert same.findings[0].recoverable_s == 0
    found = diagnosed(tmp_path, slower(cpu_rank(0, host_us=4000), 1.5), baseline=before)
    assert (found.verdict, found.findings[0].confidence) == ("inconclusive", "low")
    assert found.summary.startswith("rank 0: a step takes 15.0 ms, in the baseline 10.0 ms")


def test_a_baseline_that_is_of_no_use_is_reported(tmp_path):
    before = written(tmp_path, stepped(operator(0, 9000), steps=1), name="before")
    found = diagnosed(tmp_path, cpu_rank(0), baseline=before)
    assert found.verdict == "healthy"
    assert found.summary.endswith("; the baseline cannot be compared: only 1 step was recorded")


def test_transfers_are_compared_with_transfers(tmp_path, capsys):
    # One rank is late: the kernels of the others are transfer and waiting.
    late = (rank_trace(k, transfer_us=500, late_us=2900 * (k == 0)) for k in range(4))
    before = written(tmp_path, *late, name="before")
    now = (rank_trace(k, transfer_us=4000, late_us=3000) for k in range(4))
    paths = written(tmp_path, *now)
    assert main(["--json", *map(str, paths), "--baseline", *map(str, before)]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    finding = next(one for one in found if one["kind"] == "communication_bound")
    assert finding["confidence"] == "high"
    assert finding["evidence"][-1] == "the baseline has 6.0 %"


def unexplained(*parts: Part) -> TraceFile:
    """Idle for 60 % of the step although the work is queued."""
    return stepped(kernel(0, 2000, 0), kernel(8000, 1000, 20), kernel(9000, 1000, 20), *parts)


@pytest.mark.parametrize(
    ("part", "kind", "place"),
    [
        (("user_annotation", "env.step", 1900, 6100), "host_bound", "env.step"),
        (("cuda_runtime", "cudaMemcpyAsync", 1950, 5500), "transfer_bound", "cudaMemcpyAsync"),
        (("cuda_runtime", SYNCHRONIZE, 1950, 6000), "sync_bound", SYNCHRONIZE),
    ],
)
def test_unexplained_time_is_the_hosts_last_call(tmp_path, part, kind, place):
    found = diagnosed(tmp_path, unexplained(event(*part)))
    assert (found.verdict, found.findings[0].confidence) == (kind, "low")
    assert "idle for 60 % of the step" in found.summary
    assert f"the host is in {place}" in found.summary


def test_less_than_what_is_unexplained_never_heads_the_report(tmp_path):
    copy = event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 2000, 800, 7)
    found = diagnosed(tmp_path, unexplained(copy))
    assert [f.kind for f in found.findings] == ["transfer_bound"]
    assert found.verdict == "inconclusive"
    assert "record CUDA's synchronization events and stacks" in found.summary
    assert "; likeliest: " in found.summary


def test_idle_time_that_is_mostly_of_one_kind_is_of_that_kind(tmp_path):
    """Each is below its rule's limit, together they are above what may go unsaid."""
    trace = stepped(loading(300, kind="MultiProcessing"), kernel(1700, 8300, 1690))
    found = diagnosed(tmp_path, trace)
    assert (found.verdict, found.findings[0].confidence) == ("host_bound", "low")
    assert found.findings[0].share == pytest.approx(0.14, abs=0.001)
