"""``--trace-out``: a smaller trace for a viewer, which diagnosis judges as it judged the whole."""

import gzip
import json
from collections import Counter

import pytest

from tests.diagnosis.captures import operator, stepped
from tests.diagnosis.traces import ORIGIN_US
from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.measures.measures_json import trace_json
from warpwatch_diagnosis.report import trace_out
from warpwatch_diagnosis.report.trace_out import write_trace
from warpwatch_diagnosis.trace.files import TraceError


@pytest.mark.parametrize(
    "fault", ["data_loading", "launch_bound", "sync_bound", "transfer_bound", "gc_pause"]
)
def test_the_new_trace_has_the_same_diagnosis(fault, simulations, tmp_path):
    before = simulations.diagnosis(fault)
    write_trace(before, simulations.paths(fault), tmp_path / "reduced.json.gz")
    after = diagnose([tmp_path / "reduced.json.gz"])
    assert (after.verdict, after.summary) == (before.verdict, before.summary)
    assert after.findings == before.findings
    one, other = trace_json(before.measures[0]), trace_json(after.measures[0])
    assert other | {"file": one["file"]} == one


def test_steps_that_do_not_fit_are_left_out(simulations, tmp_path, monkeypatch):
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
    simulations, tmp_path, monkeypatch
):
    monkeypatch.setattr(trace_out, "MAX_BYTES", 50_000)
    monkeypatch.setattr(trace_out, "MAX_GAPS", 100)
    target = tmp_path / "reduced.json"
    write_trace(simulations.diagnosis("launch_bound"), simulations.paths("launch_bound"), target)
    assert target.stat().st_size < 80_000
    elements = json.loads(target.read_text())["traceEvents"]
    kept = Counter(e["cat"] for e in elements if "cat" in e)
    assert kept["user_annotation"]
    assert kept["kernel"] > kept["cpu_op"]


def test_ranks_come_into_one_file_on_one_clock(simulations, tmp_path):
    # This one has clocks that differ by up to two seconds, and sequence numbers.
    paths = simulations.paths("straggler_host", 5)
    diagnosis = simulations.diagnosis("straggler_host", 5)
    target = tmp_path / "all.json.gz"
    write_trace(diagnosis, paths[::-1], target)
    ends: dict[int, list[float]] = {}
    for e in json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]:
        if e.get("cat") == "kernel" and "nccl" in e["name"]:
            ends.setdefault(e["args"]["Seq"], []).append(e["ts"] + e["dur"])
    assert ends
    assert all(len(found) == 8 and max(found) - min(found) < 100 for found in ends.values())
    with pytest.raises(TraceError, match="8 ranks for a viewer; diagnose their own traces"):
        diagnose([target])


def test_pauses_that_the_capture_noted_stay(tmp_path):
    pauses = [[ORIGIN_US + begin + 4000, 3000] for begin in range(0, 40_000, 10_000)]
    head = {"rank": 2, "gc_pauses_us": pauses}
    trace = stepped(operator(0, 4000), operator(7000, 3000), warpwatch=head)
    path, target = trace.write(tmp_path / "a.json"), tmp_path / "b.json"
    diagnosis = diagnose([path])
    assert diagnosis.verdict == "gc_pause"
    write_trace(diagnosis, [path], target)
    assert diagnose([target]).findings == diagnosis.findings
