"""Something is always said, and nothing large stays unexplained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnosis.traces import LATEST_US, TraceFile, cpu_rank, rank_trace
from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.verdict.conclusion import Diagnosis
from warpwatch_diagnosis.verdict.corroboration import Asked

WORLD = 8


def diagnosed(folder: Path, *ranks: TraceFile) -> Diagnosis:
    return diagnose([t.write(folder / f"r{k}.json") for k, t in enumerate(ranks)])


@pytest.mark.parametrize("culprit", [0, 5])
def test_of_eight_ranks_with_one_step_each_the_late_one_is_named(
    tmp_path: Path, culprit: int
) -> None:
    late = [LATEST_US * (k == culprit) for k in range(WORLD)]
    ranks = [rank_trace(k, late_us=us, steps=1, world=WORLD) for k, us in enumerate(late)]
    found = diagnosed(tmp_path, *ranks)
    assert (found.verdict, found.findings[0].rank) == ("straggler", culprit)
    assert found.findings[0].confidence == "medium"
    assert found.findings[0].evidence[-1] == "only 1 step was recorded"


@pytest.mark.parametrize("culprit", [0, 5])
def test_of_eight_cpu_ranks_with_one_step_each_too(tmp_path: Path, culprit: int) -> None:
    waits = [0 if k == culprit else 4000 for k in range(WORLD)]
    ranks = [cpu_rank(k, waiting_us=us, steps=1) for k, us in enumerate(waits)]
    for trace in ranks:
        trace.head["distributedInfo"]["world_size"] = WORLD
    found = diagnosed(tmp_path, *ranks)
    assert (found.verdict, found.findings[0].rank) == ("straggler", culprit)


def test_a_rank_with_slower_operators_is_named_but_is_not_sure(tmp_path: Path) -> None:
    """Shared cores: 1.6 times the others' time in every step."""
    ranks = [cpu_rank(k, waiting_us=0 if k == 1 else 3750) for k in range(2)]
    (finding,) = diagnosed(tmp_path, *ranks).findings
    assert (finding.kind, finding.rank, finding.confidence) == ("straggler", 1, "low")
    assert "takes 10.0 ms, theirs 6.2 ms" in finding.evidence[0]


def test_the_anomaly_that_asked_makes_it_surer_and_names_who_it_saw(tmp_path: Path) -> None:
    paths = [
        cpu_rank(k, waiting_us=0 if k == 1 else 3750).write(tmp_path / f"r{k}.json")
        for k in range(2)
    ]
    asked = Asked("straggler", rank=1, begin_step=412, ratio=1.6)
    (finding,) = diagnose(paths, asked=asked).findings
    assert (finding.kind, finding.rank, finding.confidence) == ("straggler", 1, "medium")
    assert finding.evidence[-1] == (
        "the anomaly that asked saw it too: straggler of rank 1 since step 412, "
        "1.60 times as long as usual"
    )
    (other,) = diagnose(paths, asked=Asked("straggler", rank=0)).findings
    assert (other.rank, other.confidence) == (1, "low")


def test_of_a_rank_that_was_late_before_the_capture_less_is_enough(tmp_path: Path) -> None:
    paths = [
        cpu_rank(k, waiting_us=0 if k == 1 else 1500).write(tmp_path / f"r{k}.json")
        for k in range(2)
    ]
    assert diagnose(paths).verdict == "healthy"
    found = diagnose(paths, asked=Asked("straggler", rank=1, begin_step=412, ratio=1.2))
    assert (found.verdict, found.findings[0].rank) == ("straggler", 1)
    gone = diagnose(paths, asked=Asked("straggler", rank=0))
    assert gone.verdict == "inconclusive"
    assert gone.summary.startswith("the captured steps do not show straggler of rank 0; likeliest")


def unexplained(named: str | None, **also: int) -> TraceFile:
    """Idle for 60 % of the step although the work is queued, while the host is in ``named``."""
    trace = TraceFile()
    for begin in trace.each_step():
        trace.kernel(begin, 2000, begin)
        for at in range(begin + 8000, begin + 10_000, 1000):
            trace.kernel(at, 1000, begin + 20)
        if named:
            trace.event("user_annotation", named, begin + 1900, 6100, 77)
        for name, us in also.items():
            trace.event("cuda_runtime", name, begin + 1950, us, 77)
    return trace


@pytest.mark.parametrize(
    ("trace", "kind", "place"),
    [
        (unexplained("env.step"), "host_bound", "env.step"),
        (unexplained(None, cudaMemcpyAsync=5500), "transfer_bound", "cudaMemcpyAsync"),
        (unexplained("x", cudaStreamSynchronize=6000), "sync_bound", "cudaStreamSynchronize"),
    ],
)
def test_unexplained_time_is_put_to_what_the_host_was_in(
    tmp_path: Path, trace: TraceFile, kind: str, place: str
) -> None:
    found = diagnosed(tmp_path, trace)
    assert (found.verdict, found.findings[0].confidence) == (kind, "low")
    assert "idle for 60 % of the step" in found.summary
    assert f"the host is in {place}" in found.summary


def test_less_than_what_is_unexplained_never_heads_the_report(tmp_path: Path) -> None:
    trace = unexplained(None)
    for begin in trace.each_step():
        trace.event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", begin + 2000, 800, 7)
    found = diagnosed(tmp_path, trace)
    assert [f.kind for f in found.findings] == ["transfer_bound"]
    assert found.verdict == "inconclusive"
    assert "record CUDA's synchronization events and stacks" in found.summary
    assert "; likeliest: " in found.summary


def test_idle_time_that_is_mostly_of_one_kind_is_of_that_kind(tmp_path: Path) -> None:
    """Each is below its rule's limit, together they are above what may go unsaid."""
    trace = TraceFile()
    for begin in trace.each_step():
        trace.annotation(
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", begin, 300
        )
        trace.kernel(begin + 1700, 8300, begin + 1690)
    found = diagnosed(tmp_path, trace)
    assert (found.verdict, found.findings[0].confidence) == ("host_bound", "low")
    assert found.findings[0].share == pytest.approx(0.14, abs=0.01)


def test_a_copy_that_keeps_the_host_while_the_gpu_is_idle_is_transfer_bound(
    tmp_path: Path,
) -> None:
    """Its own event is not in the trace, nor that it is pageable."""
    trace = TraceFile()
    for begin in trace.each_step():
        trace.event("cpu_op", "aten::copy_", begin, 7100, 77)
        trace.event("cuda_runtime", "cudaMemcpyAsync", begin + 10, 7000, 77)
        trace.kernel(begin + 7200, 2800, begin + 7150)
    (finding,) = diagnosed(tmp_path, trace).findings
    assert (finding.kind, finding.confidence) == ("transfer_bound", "high")
    assert finding.share == pytest.approx(0.7, abs=0.02)
