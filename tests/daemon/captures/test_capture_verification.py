"""What a trace holds is compared with what was asked for; what it lacks is said and counted."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.captures.capture_node import MANUAL, CaptureNode, trace
from tests.daemon.state.counted import counted
from tests.diagnosis.traces import write_hostile
from warpwatch_daemon.captures.store import Store
from warpwatch_daemon.captures.verification import Expectation, TraceVerdict, verify

ASKED = Expectation(rank=0, first_step=3, last_step=5)
KERNEL = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 3100, "dur": 90}


@pytest.fixture
def node(tmp_path: Path) -> Any:
    with ExitStack() as stack:
        yield CaptureNode(tmp_path, stack)


def judge(folder: Path, content: Any, expected: Expectation = ASKED) -> TraceVerdict:
    """The verdict of the process that verifies."""
    data = content if isinstance(content, bytes) else gzip.compress(json.dumps(content).encode())
    (folder / "rank0.pt.trace.json.gz").write_bytes(data)
    (verdict,) = verify(folder, {"rank0.pt.trace.json.gz": expected}).values()
    return verdict


def with_event(event: dict[str, Any], **changes: Any) -> dict[str, Any]:
    content = trace()
    content["traceEvents"].append(event | changes)
    return content


def without(category: str) -> dict[str, Any]:
    content = trace()
    content["traceEvents"] = [e for e in content["traceEvents"] if e["cat"] != category]
    return content


@pytest.mark.parametrize(
    ("content", "problems"),
    [
        (trace(), ()),
        (with_event(KERNEL), ()),
        (trace(steps=range(3, 5)), ("steps: 3 to 4 instead of 3 to 5",)),
        (trace(steps=range(2, 6)), ("steps: 2 to 5 instead of 3 to 5",)),
        (without("user_annotation"), ("steps: none instead of 3 to 5",)),
        (without("cpu_op"), ("no_operators",)),
        (trace(rank=1), ("rank: 1 instead of 0",)),
        (trace(warpwatch={}), ("rank: not said",)),
        (trace(warpwatch={}, distributedInfo={"rank": 0}), ()),
        (with_event(KERNEL, ts=0.0), ("timestamps: 1 events have none that can be",)),
        (with_event(KERNEL, ts=-4.5), ("timestamps: 1 events have none that can be",)),
        (
            with_event(KERNEL, ts=9e9),
            ("timestamps: events 9,000.0 s apart, outside what was recorded",),
        ),
        (
            gzip.compress(json.dumps(trace()).encode()[:-40], mtime=0),
            ("unreadable: is cut short or not JSON",),
        ),
        (gzip.compress(json.dumps(trace()).encode(), mtime=0)[:-20], ("unreadable: is cut short",)),
        (b"garbage", ("unreadable: is not JSON",)),
    ],
)
def test_what_a_trace_lacks_is_named(
    tmp_path: Path, content: Any, problems: tuple[str, ...]
) -> None:
    assert judge(tmp_path, content).problems == problems


def test_a_trace_of_a_gpu_needs_kernels(tmp_path: Path) -> None:
    on_gpu = Expectation(rank=0, first_step=3, last_step=5, on_gpu=True)
    gpu = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}
    verdict = judge(tmp_path, trace() | gpu, on_gpu)
    assert verdict.problems == ("no_kernels: the rank computes on a GPU",)
    assert judge(tmp_path, with_event(KERNEL) | gpu, on_gpu) == TraceVerdict(7, ())
    assert judge(tmp_path, trace() | gpu).problems == ()


def test_a_simulated_device_runs_no_kernels(tmp_path: Path) -> None:
    on_gpu = Expectation(rank=0, first_step=3, last_step=5, on_gpu=True)
    assert judge(tmp_path, trace(deviceProperties=[]), on_gpu) == TraceVerdict(6, ())


def test_a_trace_of_a_window_needs_neither_steps_nor_rank(tmp_path: Path) -> None:
    content = without("user_annotation") | {"warpwatch": {}}
    window = Expectation(rank=0, window_s=2.0)
    assert judge(tmp_path, content, window) == TraceVerdict(3, ())
    # No one said which rank it is.
    unknown = Expectation(rank=None, window_s=2.0)
    assert judge(tmp_path, content | {"distributedInfo": {"rank": 5}}, unknown) == TraceVerdict(
        3, ()
    )
    late = content["traceEvents"] + [KERNEL | {"ts": 9e7}]
    (problem,) = judge(tmp_path, content | {"traceEvents": late}, window).problems
    assert problem == "timestamps: events 90.0 s apart, outside what was recorded"


def test_a_file_that_is_gone_costs_the_others_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank1").write_text(json.dumps(trace(rank=1)))
    verdicts = verify(tmp_path, {"rank0": ASKED, "rank1": Expectation(1, 3, 5)})
    assert verdicts == {
        "rank0": TraceVerdict(None, ("unreadable: No such file or directory",)),
        "rank1": TraceVerdict(6, ()),
    }


def test_a_verified_capture_says_so_for_every_rank(node: CaptureNode) -> None:
    asked = node.coordinator.request(MANUAL)
    for rank in (0, 1):
        node.deliver(rank)
    capture = node.finished(asked)
    assert (capture.outcome, capture.detail) == ("complete", "")
    assert [(rank.verified, rank.events) for rank in capture.ranks] == [(True, 6), (True, 6)]
    assert Store.load(node.store, 10)[0].ranks == capture.ranks


def test_a_trace_that_lacks_something_is_kept_and_the_capture_says_what(
    node: CaptureNode,
) -> None:
    asked = node.coordinator.request(MANUAL)
    node.deliver(0)
    node.deliver(1, trace(rank=1, steps=range(3, 5)))
    capture = node.finished(asked)
    assert capture.outcome == "complete"
    assert capture.detail == "rank 1 is not verified (steps: 3 to 4 instead of 3 to 5)"
    assert capture.ranks[1].verified is False
    assert "rank1.pt.trace.json.gz" in capture.files
    assert capture.diagnosis is not None
    assert counted(node.hub, "capture_problems_total", "steps") == 1


def test_one_damaged_trace_costs_the_other_ranks_no_diagnosis(node: CaptureNode) -> None:
    asked = node.coordinator.request(MANUAL)
    node.deliver(0, b"garbage")
    node.deliver(1)
    capture = node.finished(asked)
    assert capture.outcome == "partial"
    assert capture.detail == "rank 0 is not verified (unreadable: is not JSON)"
    assert capture.diagnosis is not None
    assert [found["rank"] for found in capture.diagnosis["traces"]] == [1]
    assert counted(node.hub, "capture_problems_total", "unreadable") == 1


def test_a_small_hostile_trace_is_unreadable_within_seconds_and_costs_others_nothing(
    node: CaptureNode, tmp_path: Path
) -> None:
    asked = node.coordinator.request(MANUAL)
    node.deliver(0, write_hostile(tmp_path / "hostile").read_bytes())
    node.deliver(1)
    capture = node.finished(asked)
    assert capture.outcome == "partial"
    (problem,) = capture.ranks[0].problems
    assert problem == "unreadable: has more than 1,000,000 values that are no events"
    assert capture.diagnosis is not None
    assert [found["rank"] for found in capture.diagnosis["traces"]] == [1]


def test_a_trace_that_only_the_diagnosis_cannot_read_is_named(
    node: CaptureNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = node.coordinator.request(MANUAL)
    for rank in (0, 1):
        node.deliver(rank)
    reader = tmp_path / "reader"
    reader.write_text(
        '#!/bin/sh\ncase "$*" in\n*verification*) echo "[6, []]" ;;\n'
        "*rank0.pt*) echo reading rank0.pt.trace.json.gz; kill -XCPU $$ ;;\nesac\n"
    )
    reader.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(reader))
    capture = node.finished(asked)
    assert (capture.outcome, capture.diagnosis_outcome) == ("partial", "ok")
    assert capture.detail == ("rank 0 is not verified (unreadable: it takes too long for its size)")
    assert counted(node.hub, "capture_problems_total", "unreadable") == 1


def test_a_child_that_dies_leaves_the_traces_and_an_outcome(
    node: CaptureNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = node.coordinator.request(MANUAL)
    for rank in (0, 1):
        node.deliver(rank)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    capture = node.finished(asked)
    assert capture.outcome == "failed"
    assert [rank.verified for rank in capture.ranks] == [False, False]
    assert capture.ranks[0].problems == ("unreadable: exit status 1",)
    assert counted(node.hub, "capture_problems_total", "unreadable") == 2
    assert (capture.diagnosis, capture.diagnosis_outcome) == (None, "unreadable: exit status 1")


def test_a_trace_that_takes_too_long_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = tmp_path / "reader"
    reader.write_text('#!/bin/sh\ncase "$4" in *rank0) exec sleep 60 ;; esac\necho "[6, []]"\n')
    reader.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(reader))
    verdicts = verify(tmp_path, {"rank0": ASKED, "rank1": ASKED}, timeout_s=0.5)
    assert verdicts["rank0"] == TraceVerdict(None, ("unreadable: not read in time",))
    assert verdicts["rank1"] == TraceVerdict(6, ())


def test_a_store_that_is_gone_ends_the_capture(node: CaptureNode) -> None:
    asked = node.coordinator.request(MANUAL)
    node.coordinator.finish()
    for rank in (0, 1):
        node.deliver(rank)
    shutil.rmtree(node.store.path)
    capture = node.finished(asked)
    assert capture.outcome == "failed"
    assert capture.detail == (
        "rank 0: the store: No such file or directory; rank 1: the store: No such file or directory"
    )
    assert node.counted("failed") == 1
