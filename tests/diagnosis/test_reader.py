"""Every way a file can be no trace ends in one TraceError; old and new formats read alike."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.diagnosis.traces import TraceFile, cpu_rank
from warpwatch.diagnosis import json_stream
from warpwatch.diagnosis.diagnosis import diagnose
from warpwatch.diagnosis.reader import TraceError, read_trace

GOOD = json.dumps({"traceEvents": cpu_rank(0).events}).encode()
STEP = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "tid": 1, "pid": 1}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"not a trace", "is not JSON"),
        (b"\x89PNG\r\n\x1a\n", "is not JSON"),
        (b"{}", "not a profiler trace"),
        (b"[]", "not a profiler trace"),
        (b'{"schemaVersion": 1}', "no traceEvents"),
        (b'{"traceEvents": []}', "no events"),
        (b'{"traceEvents": 5}', "no operator"),
        (b'{"traceEvents": [{"ph": "M"}, 5, null]}', "no operator"),
        (GOOD[:-40], "is cut short"),
        (gzip.compress(GOOD)[:-40], "is cut short"),
        (b"\x1f\x8b" + b"x" * 50, "damaged gzip"),
        (b'{"traceEvents": [' + b"[" * 100_000, "nested too deeply"),
        (b'{"traceEvents": [{"ph": "X"} {"ph": "X"}]}', "is not JSON"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent.json")
    with pytest.raises(TraceError, match="directory"):
        read_trace(tmp_path)


def test_a_gzip_bomb_is_refused_at_the_limit(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b'{"traceEvents":[' + b" " * 5_000_000))
    with pytest.raises(TraceError, match="more than 1,000,000 bytes decompressed"):
        read_trace(bomb, max_bytes=1_000_000)


def test_too_many_events_are_refused_at_the_limit(tmp_path: Path) -> None:
    path = cpu_rank(0).write(tmp_path / "many.json")
    with pytest.raises(TraceError, match="more than 10 events"):
        read_trace(path, max_events=10)


@pytest.mark.parametrize(
    "time",
    [{"ts": 0, "dur": 1}, {"ts": 5, "dur": -1}, {"ts": "5", "dur": 1}, {"ts": 1e300, "dur": 1}],
)
def test_events_with_impossible_times_are_left_out(tmp_path: Path, time: dict[str, Any]) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps([STEP | time]))
    with pytest.raises(TraceError, match="usable time"):
        read_trace(path)


def test_times_years_apart_mean_a_broken_clock(tmp_path: Path) -> None:
    path = tmp_path / "years.json"
    path.write_text(json.dumps([STEP | {"ts": 5, "dur": 1}, STEP | {"ts": 1.7e15, "dur": 1}]))
    with pytest.raises(TraceError, match="broken clock"):
        read_trace(path)


def test_old_categories_and_a_bare_array_read_like_the_new_ones(tmp_path: Path) -> None:
    old_names = {"user_annotation": "Operator", "cpu_op": "Operator", "kernel": "Kernel"}
    old_names["cuda_runtime"] = "Runtime"
    new = TraceFile()
    for begin in new.each_step():
        new.operator(begin, 3000)
        new.kernel(begin + 4000, 5000, launched_us=begin + 3990)
    old = [event | {"cat": old_names[event["cat"]]} for event in new.events]
    (tmp_path / "old.json").write_text(json.dumps(old))
    new.write(tmp_path / "new.json.gz")
    texts = [diagnose([tmp_path / name]).to_json() for name in ("old.json", "new.json.gz")]
    for text in texts:
        text["traces"][0]["file"] = ""
    assert texts[0] == texts[1]
    assert texts[0]["traces"][0]["time"]["gpu_busy_ratio"] == 0.5


@pytest.mark.parametrize(
    ("name", "head", "rank"),
    [
        ("a.json", {}, None),
        ("rank3.pt.trace.json", {}, 3),
        ("a.json", {"warpwatch": {"rank": 4, "job": "llama", "first_step": 7}}, 4),
        ("rank3.json", {"distributedInfo": {"rank": 5}, "warpwatch": {"rank": 4}}, 5),
        ("a.json", {"distributedInfo": {"rank": "5"}, "warpwatch": "4"}, None),
    ],
)
def test_the_rank_is_taken_from_metadata_then_from_the_name(
    tmp_path: Path, name: str, head: dict[str, Any], rank: int | None
) -> None:
    assert read_trace(TraceFile(**head).write(tmp_path / name)).rank == rank


def test_values_that_lie_across_pieces_of_the_file_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cpu_rank(1, host_us=4000).write(tmp_path / "pieces.json")
    whole = read_trace(path)
    for size in (1, 2, 7, 64):
        monkeypatch.setattr(json_stream, "CHUNK_BYTES", size)
        assert read_trace(path) == whole


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_garbage_never_raises_anything_but_a_trace_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.json"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        read_trace(path)
