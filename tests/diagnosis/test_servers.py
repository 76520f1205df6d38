"""Traces of inference servers: their marks, and what is found between and in their iterations."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cases import cases as tables
from tests.diagnosis.captures import diagnosed, written
from tests.diagnosis.traces import TraceFile
from warpwatch_diagnosis.__main__ import main
from warpwatch_diagnosis.diagnosis import Diagnosis, diagnose
from warpwatch_diagnosis.findings import RequestingAnomaly
from warpwatch_diagnosis.measures.iterations import parse
from warpwatch_diagnosis.measures.measures import cpu_ratios

FOLDER = Path(__file__).parents[3] / "shared" / "evaluation" / "traces"
VLLM = "execute_context_{0}({1})_generation_{2}({2})"
FIXTURES = Path(__file__).with_name("fixtures") / "servers"
CASES = tables(__file__)


def test_the_work_of_an_iteration_is_in_its_mark(cases):
    cases("diagnosis/marks.txt", parse)


def marked(marks: Iterable[Sequence[Any]], gpu: bool = False) -> TraceFile:
    """Return iterations with work on the CPU or the GPU; rows as in servers.yaml."""
    trace, at = TraceFile(steps=0), 0
    for count, mark, us, gap in marks:
        for _ in range(count):
            at += gap
            trace.annotation(mark, at, us)
            if gpu:
                trace.kernel(at + 50, us - 50, at + 20)
            else:
                trace.operator(at, us)
            at += us
    return trace


def server(passes: Iterable[Sequence[int]], gpu: bool = False) -> TraceFile:
    return marked([(n, VLLM.format(*work), us, gap) for n, us, gap, *work in passes], gpu)


CAPTURES: dict[str, dict[str, Any]] = CASES["captures"] | {
    f"{name}-{where}": about | {"gpu": where == "gpu"}
    for name, about in CASES["faults"].items()
    for where in ("cpu", "gpu")
}


def without_training(found: Diagnosis) -> None:
    said = " ".join(f"{finding.evidence} {finding.advice}" for finding in found.findings)
    assert "training" not in said
    assert "DataLoader" not in said


@pytest.mark.parametrize("name", CAPTURES)
def test_a_server_has_the_verdict_of_its_fault(tmp_path, name, golden_text):
    about, options = CAPTURES[name], dict[str, Any]()
    if "marks" in about:
        trace = marked(about["marks"])
    else:
        trace = server(about["passes"], about.get("gpu", False))
    if "baseline" in about:
        options["baseline"] = written(tmp_path, server(about["baseline"]), name="before")
    if "anomaly" in about:
        options["anomaly"] = RequestingAnomaly(about["anomaly"])
    found = diagnosed(tmp_path, trace, **options)
    golden_text(found)
    marks = sum(one["cat"] == "user_annotation" for one in trace.events)
    assert (found.verdict, found.measures[0].step_count) == (about["verdict"], marks)
    without_training(found)


def test_a_training_that_generates_text_keeps_its_steps(tmp_path):
    trace = TraceFile(steps=4)
    for begin in trace.each_step():
        for at in range(begin, begin + 10_000, 1000):
            trace.annotation(VLLM.format(0, 0, 8), at, 900)
            trace.operator(at, 900)
    found = diagnosed(tmp_path, trace).measures[0]
    assert (found.server, found.step_count) == (None, 4)


def test_a_wait_for_work_is_no_problem_to_the_command(tmp_path):
    busy, waiting = (5, 4000, 200, 0, 0, 8), (1, 4000, 60_000, 1, 64, 0)
    for passes in ([busy, waiting], [busy]):
        assert main([str(server(passes).write(tmp_path / "rank0.json"))]) == 0


# Captured by the shim from vLLM 0.32.0 with a tiny model, on two busy cores. While it decodes, the
# log of the same run has a scheduler that takes 36 ms of an iteration. The thrashing server
# preempts a request in one of a hundred iterations, none of which is captured.
RECORDED: dict[str, tuple[str, RequestingAnomaly | None]] = {
    "idle": ("waiting_for_work", None),
    "decode": ("scheduler_bound", None),
    "prefill": ("healthy", None),
    "thrash": ("healthy", None),
    "thrash that an anomaly counted": ("kv_thrash", RequestingAnomaly("kv_thrash")),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_iterations_of_vllm_on_the_cpu_have_a_right_verdict(name, golden_text):
    verdict, anomaly = RECORDED[name]
    found = diagnose([FIXTURES / f"{name.split()[0]}.pt.trace.json.gz"], anomaly=anomaly)
    golden_text(found)
    assert (found.verdict, found.measures[0].step_count) == (verdict, 5)
    without_training(found)


@pytest.mark.parametrize(
    ("phase", "verdict"), [("forward", "host_bound"), ("schedule", "scheduler_bound")]
)
def test_time_before_the_first_operator_is_the_workers_own_in_its_forward_pass(
    tmp_path, phase, verdict
):
    trace = TraceFile(steps=4, warpwatch={"iterations": [[0, 8, 900]] * 4})
    for begin in trace.each_step():
        trace.annotation(phase, begin, 9000)
        trace.operator(begin + 7000, 3000)
        trace.event("cpu_op", "aten::mm", begin, 10_000, 9)
    found = diagnosed(tmp_path, trace)
    assert found.verdict == verdict
    ratios = cpu_ratios(found.measures[0])
    assert ratios is not None
    assert ratios["scheduler_ratio"] == (0.6364 if phase == "schedule" else 0.0)


@pytest.mark.parametrize("noted", [[[1]], [[1, 2, 3]] * 4, [[1, -2, 3]], "x", [[1, 2.5]], [None]])
def test_a_note_of_work_that_does_not_fit_the_steps_is_ignored(tmp_path, noted):
    trace = TraceFile(steps=1, warpwatch={"iterations": noted})
    trace.operator(0, 9000)
    assert diagnosed(tmp_path, trace).measures[0].server is None


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the evaluation traces are not here")
@pytest.mark.parametrize(
    ("name", "verdict"), [("vllm_prefilldecode", "healthy"), ("sglang_decode", "sync_bound")]
)
def test_traces_of_real_servers_have_a_right_verdict(name, verdict, golden_text):
    found = diagnose([FOLDER / f"{name}_mi300x.json.gz"])
    golden_text(found)
    assert found.verdict == verdict
    # The host is blocked in one copy, and the work that it waited for is not in the trace.
    assert {finding.confidence for finding in found.findings} <= {"low"}
    without_training(found)
