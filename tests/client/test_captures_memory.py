"""Kinds memory and nsys. Without a GPU the allocator and Nsight are stand-ins that say so."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.client.daemon_side import Folder, program
from tests.client.training import begun, capture, event, events, files, running, training
from warpwatch.captures.memory import MemoryRecorder, summary

# What torch.cuda.memory._snapshot() answers on a GPU, in the parts that are read.
SNAPSHOT: dict[str, Any] = {
    "segments": [
        {
            "total_size": 2048,
            "blocks": [
                {
                    "size": 1024,
                    "state": "active_allocated",
                    "frames": [
                        {"filename": "??", "line": 0, "name": "at::empty"},
                        {"filename": "/job/model.py", "line": 7, "name": "forward"},
                        {"filename": "/job/train.py", "line": 3, "name": "<module>"},
                    ],
                },
                {"size": 512, "state": "active_awaiting_free", "frames": []},
                {"size": 512, "state": "inactive", "frames": []},
            ],
        }
    ],
    "device_traces": [[{"action": "alloc"}, {"action": "free"}]],
}
# The process believes that it has a GPU; its allocator is this stand-in.
STAND_IN = f"""
class StandIn:
    calls = []
    def _record_memory_history(self, enabled="all", *, stacks="all", max_entries=None):
        self.calls.append((enabled, stacks, max_entries))
    def _snapshot(self):
        assert self.calls == [("all", "python", 100_000)]
        return {SNAPSHOT!r}
torch.cuda.memory = StandIn()
torch.cuda.is_initialized = lambda: True
history = []
torch._C._cuda_isHistoryEnabled = lambda: bool(history)
"""
NSYS = """
class StandIn:
    said = []
    def __getattr__(self, name):
        return lambda *arguments: self.said.append((name, *arguments))
torch.cuda.profiler = torch.cuda.nvtx = stand_in = StandIn()
torch.cuda.is_initialized = lambda: True
def inside(number):
    if ("stop",) in StandIn.said:
        with open(sys.argv[1], "w") as file: print(StandIn.said, file=file)
        StandIn.said.clear()
"""


def test_the_summary_names_the_lines_that_hold_most() -> None:
    assert summary(SNAPSHOT) == {
        "reserved_bytes": 2048,
        "allocated_bytes": 1536,
        "history_entries": 2,
        "lines": [
            {"line": "/job/model.py:7 forward", "bytes": 1024, "blocks": 1},
            {"line": "?", "bytes": 512, "blocks": 1},
        ],
    }
    nothing = {"reserved_bytes": 0, "allocated_bytes": 0, "history_entries": 0, "lines": []}
    assert summary({}) == nothing


def test_a_recording_that_is_dropped_stops_the_history() -> None:
    class Memory:
        def __init__(self) -> None:
            self.calls: list[object] = []

        def _record_memory_history(self, enabled: object, **options: object) -> None:
            self.calls.append(enabled)

    class Torch:
        class cuda:
            memory = Memory()

    recorder = MemoryRecorder(Torch)
    recorder.drop()
    assert Torch.cuda.memory.calls == []
    recorder.prepare()
    recorder.start(3)
    recorder.drop()
    recorder.drop()
    assert Torch.cuda.memory.calls == ["all", None]


@pytest.mark.torch
def test_a_process_without_a_gpu_refuses(folder: Folder) -> None:
    with program(folder, training()):
        running(folder)
        capture(folder, start=10**6, kind="memory")
        assert event(folder, "capture_failed")["detail"] == "no_cuda"
        capture(folder, start=10**6, kind="nsys", id="n-1")
        assert event(folder, "capture_failed", "n-1")["detail"] == "not_under_nsys"


@pytest.mark.torch
def test_the_allocators_history_becomes_a_snapshot_and_a_summary(folder: Folder) -> None:
    with program(folder, training(STAND_IN), WARPWATCH_CUDA_EVENTS="0"):
        ring = running(folder)
        start = begun(folder) + 20
        capture(folder, start, steps=3, kind="memory")
        finished = event(folder, "capture_finished")
        assert finished["detail"] == "snapshot 0.0 s"
        assert (finished["first_step"], finished["last_step"]) == (start, start + 2)
        snapshot = f"c-1.{ring.name}.{finished['token']}.memory.pickle"
        summary = f"c-1.{ring.name}.{finished['more']}.memory.json"
        assert pickle.loads((folder.path / "inbox" / snapshot).read_bytes()) == SNAPSHOT
        reported = json.loads((folder.path / "inbox" / summary).read_text())
        assert (reported["rank"], reported["job"], reported["snapshot_s"]) == (0, "demo", 0.0)
        assert reported["lines"][0]["line"] == "/job/model.py:7 forward"
        assert files(folder) == sorted([summary, snapshot])


@pytest.mark.torch
def test_history_that_the_program_records_itself_is_left_alone(folder: Folder) -> None:
    code = training(STAND_IN + "history.append(1)\n")
    with program(folder, code, WARPWATCH_CUDA_EVENTS="0"):
        running(folder)
        capture(folder, start=10**6, kind="memory")
        assert event(folder, "capture_failed")["detail"] == "memory_busy"


@pytest.mark.torch
def test_nsight_is_reported_the_steps(folder: Folder, tmp_path: Path) -> None:
    said = tmp_path / "said"
    under = {"NSYS_PROFILING_SESSION_ID": "1", "WARPWATCH_CUDA_EVENTS": "0"}
    with program(folder, training(NSYS), str(said), **under):
        running(folder)
        # Two profilers of the GPU are one too many.
        capture(folder, start=10**6, id="t-1")
        refused = "cupti_busy: NSYS_PROFILING_SESSION_ID is set"
        assert event(folder, "capture_failed", "t-1")["detail"] == refused
        start = begun(folder) + 20
        capture(folder, start, steps=2, kind="nsys")
        assert event(folder, "capture_finished") == {
            "event": "capture_finished",
            "id": "c-1",
            "first_step": start,
            "last_step": start + 1,
        }
        assert [found["event"] for found in events(folder, "c-1")] == [
            *("capture_armed", "capture_started", "capture_finished"),
        ]
    expected = [
        ("start",),
        *(("range_push", f"step {start}"), ("range_pop",)),
        *(("range_push", f"step {start + 1}"), ("range_pop",)),
        ("stop",),
    ]
    assert said.read_text() == f"{expected}{os.linesep}"
