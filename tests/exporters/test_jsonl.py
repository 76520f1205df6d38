"""The telemetry log on disk: whole lines, each record once, after any exit of the daemon."""

import errno
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from warpwatch_exporters.jsonl import JsonlWriter
from warpwatch_telemetry.records import Clock, DeviceReading, End, RankSeen, Record, Step

RECORDS: list[Record] = [
    RankSeen(10.0, "llama", 0, 2, "GPU-a"),
    Step(11.0, "llama", 0, 0, 0.5, phases_s={"comm": 0.1}, samples=32),
    DeviceReading(11.5, "GPU-a", {("device_power_watts", ()): 512.0}),
    End(12.0, "llama", 0),
]


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_lines_at_once(tmp_path, golden, monkeypatch):
    log = tmp_path / "log.jsonl"
    writer = JsonlWriter(log)
    assert writer.write(RECORDS) == JsonlWriter(Path(os.devnull)).write(RECORDS) == 4
    golden("exporters/log.jsonl", log.read_bytes())
    for _ in range(2):
        writer.close()
    (tmp_path / "link").symlink_to(log)
    with pytest.raises(OSError, match="symbolic links"):
        JsonlWriter(tmp_path / "link")
    # One that cannot be read is closed again.
    monkeypatch.setattr(os, "pread", Mock(side_effect=OSError))
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        JsonlWriter(log)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_what_a_killed_daemon_had_already_written_is_not_written_again(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    JsonlWriter(log).write([*(Step(11.0 + i, "llama", 0, i, 0.5) for i in range(5)), RECORDS[0]])
    again: list[Record] = [Step(11.0 + i, "llama", 0, i, 0.5) for i in (0, 3, 4, 5, 6)]
    other = Step(11.0, "llama", 1, 0, 0.5)
    assert JsonlWriter(log).write([*again, other, Clock(3.0)]) == 4
    steps = [line["step"] for line in lines_of(log) if line.get("rank") == 0 and "step" in line]
    assert steps == [0, 1, 2, 3, 4, 5, 6]


def test_a_half_written_line_is_ended_and_the_next_record_stands_alone(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    # A line of anything may be in it, too.
    log.write_bytes(b"[" * 99_999 + b'\n{"type":"step","ti')
    JsonlWriter(log).write([Clock(2.0)])
    lines = log.read_text().splitlines()
    assert lines[1:] == ['{"type":"step","ti', '{"type":"clock","time":2.0}']


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    filler = b'{"type":"clock","time":1.0}\n'
    old = b'{"type":"step","time":99.0,"job":"old","rank":0,"step":1,"duration_s":1.0}\n'
    new = old.replace(b"old", b"new")
    log.write_bytes(old + filler * (2**18 // len(filler) + 1) + new)
    writer = JsonlWriter(log)
    assert writer.write([Step(50.0, "old", 0, 2, 1.0)]) == 1
    assert writer.write([Step(50.0, "new", 0, 2, 1.0)]) == 0


def test_a_value_that_json_does_not_have_costs_its_record_only(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert JsonlWriter(log).write([Step(1.0, "a", 0, 1, float("nan")), Clock(2.0)]) == 1
    assert lines_of(log) == [{"type": "clock", "time": 2.0}]


def test_a_full_disk_is_an_error_and_leaves_whole_lines(tmp_path, monkeypatch):
    log = tmp_path / "log.jsonl"
    writer = JsonlWriter(log)
    # A disk that fills up cuts a write short.
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:100]))
    with pytest.raises(OSError, match="No space left on device") as raised:
        writer.write([Clock(float(i)) for i in range(10)])
    assert raised.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert [line["time"] for line in lines_of(log)] == [0.0, 1.0, 2.0]
    assert writer.write([Clock(3.0)]) == 1
    assert lines_of(log)[-1]["time"] == 3.0
