"""``--trace-out``: a smaller trace for a viewer, which diagnosis judges as it judged the whole."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.diagnosis.conftest import Simulations
from tests.diagnosis.traces import ORIGIN_US, cpu_rank, kernel, loading, operator, stepped
from warpwatch_diagnosis.__main__ import main
from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.measures.measures_json import trace_json
from warpwatch_diagnosis.report import trace_out
from warpwatch_diagnosis.report.trace_out import write_trace
from warpwatch_diagnosis.trace.errors import TraceError


def _elements(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return found


@pytest.mark.parametrize(
    "fault", ["data_loading", "launch_bound", "sync_bound", "transfer_bound", "gc_pause"]
)
def test_the_new_trace_has_the_same_diagnosis(
    fault: str, simulations: Simulations, tmp_path: Path
) -> None:
    before = simulations.diagnosis(fault)
    write_trace(before, simulations.paths(fault), tmp_path / "reduced.json.gz")
    after = diagnose([tmp_path / "reduced.json.gz"])
    assert (after.verdict, after.summary) == (before.verdict, before.summary)
    assert after.findings == before.findings
    one, other = trace_json(before.measures[0]), trace_json(after.measures[0])
    assert other | {"file": one["file"]} == one


def test_steps_that_do_not_fit_are_left_out(
    simulations: Simulations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = simulations.paths("data_loading")
    before = simulations.diagnosis("data_loading")
    monkeypatch.setattr(trace_out, "MAX_BYTES", path.stat().st_size // 2)
    target = tmp_path / "reduced.json"
    write_trace(before, [path], target)
    after = diagnose([target])
    assert 2 <= len(after.measures[0].steps) < len(before.measures[0].steps)
    longest = max(before.measures[0].per_step, key=lambda s: s.duration_us).number
    assert longest in {s.number for s in after.measures[0].per_step}
    assert after.verdict == before.verdict == "data_loading"
    assert target.stat().st_size < path.stat().st_size


def test_a_step_that_is_too_large_is_cut_and_the_file_stays_small(
    simulations: Simulations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_out, "MAX_BYTES", 50_000)
    monkeypatch.setattr(trace_out, "MAX_GAPS", 100)
    target = tmp_path / "reduced.json"
    write_trace(simulations.diagnosis("launch_bound"), simulations.paths("launch_bound"), target)
    assert target.stat().st_size < 80_000
    kept = Counter(e["cat"] for e in _elements(target) if "cat" in e)
    assert kept["user_annotation"]
    assert kept["kernel"] > kept["cpu_op"]


def test_idle_time_is_a_track_of_its_own_and_launches_have_arrows(tmp_path: Path) -> None:
    trace = stepped(
        loading(6000),
        kernel(6010, 3990, 6000),
        deviceProperties=[{"id": 0, "name": "NVIDIA H100"}],
        distributedInfo={"rank": 5, "world_size": 8},
    )
    path, target = trace.write(tmp_path / "a.json"), tmp_path / "out.json"
    assert main([str(path), "--trace-out", str(target)]) == 1
    elements = _elements(target)
    idle = [e for e in elements if e.get("cat") == "idle"]
    assert [e["dur"] for e in idle if e["name"] == "idle: data_loading"] == [6000.0] * 4
    (process,) = {e["pid"] for e in idle}
    names = {e["pid"]: e["args"]["name"] for e in elements if e["name"] == "process_name"}
    assert names == {77: "CPU, process 77", 0: "GPU 0", process: "GPU idle, by cause"}
    arrows = Counter((e["id"], e["ph"], e["pid"]) for e in elements if e.get("cat") == "ac2g")
    assert set(arrows) == {(n, *end) for n in range(1, 5) for end in (("s", 77), ("f", 0))}
    assert diagnose([target]).measures[0].device_name == "NVIDIA H100"
    assert diagnose([target]).measures[0].rank == 5


def test_ranks_come_into_one_file_on_one_clock(simulations: Simulations, tmp_path: Path) -> None:
    # This one has clocks that differ by up to two seconds, and sequence numbers.
    paths = simulations.paths("straggler_host", 5)
    diagnosis = simulations.diagnosis("straggler_host", 5)
    assert diagnosis.alignment is not None
    assert max(map(abs, diagnosis.alignment.offsets_us)) > 1e5
    target = tmp_path / "all.json.gz"
    write_trace(diagnosis, paths[::-1], target)
    elements = _elements(target)
    names = {e["args"]["name"]: e["pid"] for e in elements if e["name"] == "process_name"}
    assert len(names) == len(set(names.values())) == 3 * len(paths)
    assert "rank 7: GPU idle, by cause" in names
    order = {
        e["pid"]: e["args"]["sort_index"] for e in elements if e["name"] == "process_sort_index"
    }
    in_order = sorted(names, key=lambda name: order[names[name]])
    assert [name.partition(":")[0] for name in in_order[::3]] == [f"rank {n}" for n in range(8)]
    ends: dict[int, list[float]] = {}
    for e in elements:
        if e.get("cat") == "kernel" and "nccl" in e["name"]:
            ends.setdefault(e["args"]["Seq"], []).append(e["ts"] + e["dur"])
    assert ends
    assert all(len(found) == 8 and max(found) - min(found) < 100 for found in ends.values())
    with pytest.raises(TraceError, match="8 ranks for a viewer; diagnose their own traces"):
        diagnose([target])


def test_a_cpu_trace_has_no_idle_track(tmp_path: Path) -> None:
    path, target = cpu_rank(0, loading_us=6000).write(tmp_path / "a.json"), tmp_path / "b.json"
    diagnosis = diagnose([path])
    write_trace(diagnosis, [path], target)
    assert {e.get("cat") for e in _elements(target)} == {"user_annotation", "cpu_op", None}
    assert diagnose([target]).findings == diagnosis.findings


def test_pauses_that_the_capture_noted_stay(tmp_path: Path) -> None:
    pauses = [[ORIGIN_US + begin + 4000, 3000] for begin in range(0, 40_000, 10_000)]
    head = {"rank": 2, "gc_pauses_us": pauses}
    trace = stepped(operator(0, 4000), operator(7000, 3000), warpwatch=head)
    path, target = trace.write(tmp_path / "a.json"), tmp_path / "b.json"
    diagnosis = diagnose([path])
    assert diagnosis.verdict == "gc_pause"
    write_trace(diagnosis, [path], target)
    assert diagnose([target]).findings == diagnosis.findings
