"""Kinds memory and nsys. Without a GPU the allocator and Nsight are stand-ins that say so."""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.client.daemon_side import Folder
from tests.client.fork_server import ForkServer
from tests.client.training import training
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
torch.cuda.profiler = torch.cuda.nvtx = StandIn()
torch.cuda.is_initialized = lambda: True
"""
NO_EVENTS = {"WARPWATCH_CUDA_EVENTS": "0"}


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
def test_a_process_without_a_gpu_refuses(folder: Folder, with_torch: ForkServer) -> None:
    with training(folder, with_torch) as found:
        for kind, reason in (("memory", "no_cuda"), ("nsys", "not_under_nsys")):
            found.capture(kind, kind=kind)
            found.steps(1)
            assert found.detail(kind) == reason


@pytest.mark.torch
def test_the_allocators_history_becomes_two_files(folder: Folder, with_torch: ForkServer) -> None:
    with training(folder, with_torch, STAND_IN, **NO_EVENTS) as found:
        start = found.capture(steps=3, kind="memory")
        found.steps(6)
        finished = found.event("capture_finished")
        assert (finished["first_step"], finished["last_step"]) == (start, start + 2)
        base = f"c-1.{folder.ring().name}"
        snapshot = f"{base}.{finished['token']}.memory.pickle"
        summary = f"{base}.{finished['more']}.memory.json"
        assert pickle.loads((folder.path / "inbox" / snapshot).read_bytes()) == SNAPSHOT
        reported = json.loads((folder.path / "inbox" / summary).read_text())
        assert (reported["rank"], reported["job"]) == (0, "demo")
        assert finished["detail"] == f"snapshot {reported['snapshot_s']} s"
        assert reported["lines"][0]["line"] == "/job/model.py:7 forward"
        assert found.files() == sorted([summary, snapshot])
        # One that the program records itself is left alone.
        found.steps(1, "history.append(1)")
        found.capture("busy", kind="memory")
        found.steps(1)
        assert found.detail("busy") == "memory_busy"


@pytest.mark.torch
def test_nsight_is_told_the_steps(folder: Folder, with_torch: ForkServer, tmp_path: Path) -> None:
    under = {"NSYS_PROFILING_SESSION_ID": "1", **NO_EVENTS}
    with training(folder, with_torch, NSYS, **under) as found:
        # Two profilers of the GPU are one too many.
        found.capture("t-1")
        found.steps(1)
        assert found.detail("t-1") == "cupti_busy: NSYS_PROFILING_SESSION_ID is set"
        start = found.capture(kind="nsys")
        found.steps(6)
        steps = {"first_step": start, "last_step": start + 1}
        finished = {"event": "capture_finished", "id": "c-1", **steps}
        assert found.event("capture_finished") == finished
        assert found.names() == ["capture_armed", "capture_started", "capture_finished"]
        said = tmp_path / "said"
        found.steps(1, f"with open({str(said)!r}, 'w') as file: file.write(repr(StandIn.said))")
    assert ast.literal_eval(said.read_text()) == [
        ("start",),
        *(("range_push", f"step {start}"), ("range_pop",)),
        *(("range_push", f"step {start + 1}"), ("range_pop",)),
        ("stop",),
    ]
