"""A rank's measures as a file: smaller than its trace, the same diagnosis, and not trusted."""

import gzip
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.diagnosis.trace.odd_traces import verdict
from tests.diagnosis.traces import LATEST_US, RANKS, rank_trace
from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.measures import reduction
from warpwatch_diagnosis.measures.measures import Measures, measure
from warpwatch_diagnosis.measures.reduction import pack, read_reduction
from warpwatch_diagnosis.trace.files import TraceError, reduction_name
from warpwatch_diagnosis.trace.reader import read_trace


def measured(folder: Path, rank: int = 0, late_us: float = 0) -> Measures:
    trace = rank_trace(rank, late_us=late_us, clock_us=7777.125 * rank)
    return measure(read_trace(trace.write(folder / f"rank{rank}.json")))


def packed(folder: Path, measures: Measures, rank: int = 0) -> Path:
    path = folder / reduction_name(f"rank{rank}.pt.trace.json.gz")
    path.write_bytes(pack(measures))
    return path


def test_a_diagnosis_of_reductions_is_that_of_the_traces(tmp_path):
    late = [LATEST_US if rank == 2 else 0 for rank in range(RANKS)]
    ranks = [measured(tmp_path, rank, us) for rank, us in enumerate(late)]
    reductions = [packed(tmp_path, one, rank) for rank, one in enumerate(ranks)]
    nodes = {0: "gpu-1", 1: "gpu-1", 2: "gpu-2", 3: "gpu-2"}
    found = diagnose(reductions, nodes=nodes).to_json()
    traces = [tmp_path / f"rank{rank}.json" for rank in range(RANKS)]
    assert found == diagnose(traces, nodes=nodes).to_json()
    (straggler,) = found["findings"]
    assert (found["verdict"], straggler["rank"], straggler["node"]) == ("straggler", 2, "gpu-2")
    assert found["summary"].startswith("rank 2 on gpu-2 keeps the others waiting")
    assert [one["node"] for one in found["traces"]] == list(nodes.values())


def test_a_large_one_loses_precision_but_no_time(tmp_path, monkeypatch):
    # Far from the epoch a time has no ns.
    small = replace(measured(tmp_path), window=(0.0, 2e5))
    assert small.gpu is not None
    noise = random.Random(0)
    begins = [10 * number + 5 * noise.random() for number in range(20_000)]
    busy = [(begin, begin + 2.5) for begin in begins]
    other = [(begin, end + noise.random()) for begin, end in busy]
    large = replace(small, gpu=replace(small.gpu, busy=busy, compute=other, idle=other))
    monkeypatch.setattr(reduction, "MAX_BYTES", 100_000)
    path = packed(tmp_path, large)
    assert path.stat().st_size <= 100_000
    back = read_reduction(path)
    assert back.gpu is not None
    assert sum(end - begin for begin, end in back.gpu.busy) == pytest.approx(50_000, rel=0.01)
    assert back.timeline is None
    monkeypatch.setattr(reduction, "MAX_BYTES", 1000)
    with pytest.raises(TraceError, match="bytes; capture less"):
        pack(large)


NONE = "no reduction of this version"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "too large for a reduction"),
        (b"no gzip", NONE),
        (gzip.compress(b"\xc1", mtime=0), NONE),
        (gzip.compress(msgspec.msgpack.encode([1, {"rank": "x"}]), mtime=0), NONE),
        (gzip.compress(msgspec.msgpack.encode([9, {}]), mtime=0), "of schema 9, not 1"),
        (gzip.compress(b"\x91" * 100_000, mtime=0), NONE),
        (bytes(2**20 + 1), "more than 1,048,576 bytes"),
    ],
)
def test_what_is_no_reduction_is_refused(tmp_path, content, why):
    path = tmp_path / "rank0.reduction.gz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=why):
        read_reduction(path)


@pytest.mark.parametrize(
    ("devices", "busy", "why"),
    [
        ({"busy_ratio": -65536.0}, None, "its busy_ratio is not between 0 and 1"),
        ({"count": float("nan")}, None, r"a number in it is not below 1e\+30"),
        ({"busy_ratio": 1e300}, None, r"a number in it is not below 1e\+30"),
        ({}, [(2.0, 3.0), (0.0, 1.0)], "its intervals are not in order"),
        ({}, [(3.0, 2.0)], "its intervals are not in order"),
    ],
)
def test_times_and_shares_that_no_trace_has_are_refused(tmp_path, devices, busy, why):
    measures = measured(tmp_path)
    gpu = measures.gpu
    assert gpu is not None
    wrong = tuple(replace(device, **devices) for device in gpu.devices)
    gpu = replace(gpu, devices=wrong, busy=busy or gpu.busy)
    path = packed(tmp_path, replace(measures, window=(0.0, 10.0), gpu=gpu))
    with pytest.raises(TraceError, match=f"{NONE}: {why}"):
        read_reduction(path)


def test_a_longest_step_without_a_duration_is_drawn_as_empty(tmp_path):
    measures = measured(tmp_path)
    assert measures.timeline is not None
    empty = replace(measures.timeline, duration_us=0)
    path = packed(tmp_path, replace(measures, timeline=empty))
    assert verdict(path) is not None


def test_a_small_one_that_grows_is_refused(tmp_path, monkeypatch):
    path = packed(tmp_path, measured(tmp_path))
    size = len(gzip.decompress(path.read_bytes()))
    monkeypatch.setattr(reduction, "MAX_UNPACKED_BYTES", size)
    assert read_reduction(path).rank == 0
    monkeypatch.setattr(reduction, "MAX_UNPACKED_BYTES", size - 1)
    with pytest.raises(TraceError, match=NONE):
        read_reduction(path)


def test_one_of_another_rank_than_it_says_is_refused(tmp_path):
    for rank in (3, None):
        path = packed(tmp_path, replace(measured(tmp_path), rank=rank), rank=13)
        with pytest.raises(TraceError, match=f"is of rank {rank}"):
            read_reduction(path)
