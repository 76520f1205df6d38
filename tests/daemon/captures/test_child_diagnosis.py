"""What the daemon knows of a capture reaches the diagnosis in its own process."""

from __future__ import annotations

import json
from pathlib import Path

from tests.diagnosis.traces import cpu_rank
from warpwatch_daemon.captures import child


def written(folder: Path, world_size: int) -> list[str]:
    traces = [cpu_rank(k, waiting_us=3000) for k in range(2)]
    for rank, trace in enumerate(traces):
        trace.head["distributedInfo"]["world_size"] = world_size
        trace.write(folder / f"rank{rank}.json")
    return ["rank0.json", "rank1.json"]


def test_ranks_that_brought_no_trace_are_named_with_their_reason(tmp_path: Path) -> None:
    files = written(tmp_path, world_size=3)
    assert child.diagnose("trace", tmp_path, files, {2: "did not answer"}) == "ok"
    found = json.loads((tmp_path / "diagnosis.json").read_text())
    assert found["verdict"] == "inconclusive"
    assert "without the trace of rank 2 (did not answer) the reason" in found["summary"]


def test_files_of_one_rank_are_no_capture(tmp_path: Path) -> None:
    files = written(tmp_path, world_size=2)
    outcome = child.diagnose("trace", tmp_path, [files[0], files[0]], {})
    assert outcome.startswith(child.UNREADABLE + "these are not ranks of one capture: rank 0")
