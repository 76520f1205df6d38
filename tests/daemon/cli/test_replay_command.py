"""`warpwatch replay`: logs as they lie on disks, and what it prints, filtered and explained."""

import gzip
import io
import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.detection.streams import Job, slow_rank
from warpwatch_daemon.cli import main
from warpwatch_daemon.cli.replay import LogReader, read_lines
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.log import encode
from warpwatch_telemetry.records import Record


def lines(records: Iterable[Record]) -> list[bytes]:
    return [json.dumps(encode(record)).encode() + b"\n" for record in records]


@pytest.fixture(scope="module")
def slow_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "slow.jsonl"
    path.write_bytes(b"".join(lines(slow_rank(500, 300))))
    return path


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_it_finds_what_a_daemon_would_have_found_also_in_a_packed_log_on_standard_input(
    slow_log, capsys, monkeypatch, tmp_path
):
    packed = io.BytesIO(gzip.compress(slow_log.read_bytes()))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(packed)))
    assert main(["replay", "-", "--json"]) == 1
    (anomaly,) = map(json.loads, printed(capsys))
    assert (anomaly["kind"], anomaly["job"], anomaly["rank"]) == ("straggler", "llama", 1)
    assert 500 <= anomaly["step"] <= 530
    switched_off = "detection.disabled=[straggler]"
    assert main(["replay", str(slow_log), "--json", "--set", switched_off]) == 0
    assert printed(capsys) == []
    (config := tmp_path / "c.yaml").write_text("detection: {disabled: [straggler]}")
    assert main(["replay", str(slow_log), "--config", str(config)]) == 0


def test_explain_keeps_anomalies_as_they_are_and_adds_readings(slow_log, capsys):
    assert main(["replay", str(slow_log), "--json"]) == 1
    plain = printed(capsys)
    assert main(["replay", str(slow_log), "--json", "--explain"]) == 1
    explained = printed(capsys)
    assert explained[: len(plain)] == plain
    more = [json.loads(line) for line in explained[len(plain) :]]
    statuses = [line for line in more if line["type"] == "reading"]
    assert {line["type"] for line in more} <= {"reading", "suppressed", "budget"}
    (given,) = [line for line in more if line["type"] == "budget" and line["kind"] == "straggler"]
    assert given["false_alarms_per_job_day"] == pytest.approx(0.5 * 0.1)
    assert {"answer", "value", "baseline", "limit", "nearest", "text"} <= statuses[0].keys()


def test_only_the_asked_kind_and_job_are_shown(slow_log, capsys):
    assert main(["replay", str(slow_log), "--explain", "--json", "--kind", "hang"]) == 0
    assert {json.loads(line)["kind"] for line in printed(capsys)} <= {"hang"}
    assert main(["replay", str(slow_log), "--explain", "--json", "--job", "other"]) == 0
    assert printed(capsys) == []


def test_a_strangers_name_reaches_no_terminal_as_it_is(slow_log, tmp_path, capsys):
    hostile = "j\x1b]0;owned\x07\u202e\x9b2J"
    log = tmp_path / "log"
    log.write_bytes(slow_log.read_bytes().replace(b'"llama"', json.dumps(hostile).encode()))
    assert main(["replay", str(log)]) == 1
    assert main(["replay", str(tmp_path / hostile)]) == 2
    written = capsys.readouterr()
    assert "\\x1b]0;owned\\x07" in written.out
    assert "\\x1b]0;owned\\x07" in written.err
    assert all(c == "\n" or c.isprintable() for c in written.out + written.err)


def test_a_job_name_that_no_terminal_can_show_is_written_escaped(
    slow_log, tmp_path, capfdbinary, monkeypatch
):
    log = tmp_path / "log"
    log.write_bytes(slow_log.read_bytes().replace(b'"llama"', b'"\\ud800"'))
    with open(1, "w", encoding="ascii", closefd=False) as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        assert main(["replay", str(log), "--explain"]) == 1
    assert b"straggler \\ud800 step" in capfdbinary.readouterr().out


def test_bad_lines_are_left_out_and_reported_in_one_line(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    bad = [b"{torn\n", b'{"type":"strange","time":1}\n', b"\xff\xfe\n", b"\n"]
    log.write_bytes(b"".join([*lines(Job(ranks=1).steps(5)), *bad]))
    assert main(["replay", str(log)]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("warpwatch: 3 bad lines (not JSON 2, type 1), the first is line 6: ")


def test_a_packed_log_reads_as_the_plain_one_as_far_as_it_is_written(tmp_path):
    plain = b"".join(lines(Job(ranks=2).steps(500)))
    content, log = gzip.compress(plain), tmp_path / "log"
    log.write_bytes(content)
    assert b"".join(read_lines(log)) == plain
    log.write_bytes(content[: len(content) // 2])
    reader = LogReader()
    assert len(list(reader.records(read_lines(log)))) > 100
    assert reader.complaint() == ""
    log.write_bytes(content[:2] + bytes(range(200)))
    with pytest.raises(UsageError, match="log: "):
        list(read_lines(log))


def test_a_half_written_last_line_is_not_counted_but_one_in_the_middle_is():
    job = Job(ranks=1)
    reader = LogReader()
    log = [*lines(job.steps(2)), b'{"type":"step","ti']
    assert len(list(reader.records(log))) == 2
    assert reader.complaint() == ""
    log = [*log, *lines(job.steps(2))]
    assert len(list(reader.records(log))) == 4
    assert reader.complaint().startswith("1 bad lines (not JSON 1), the first is line 3: ")
    # A last line that lacks only its end is a record.
    log = [b'{"type":"clock","time":1}\n', b'{"type":"clock","time":2}']
    assert [record.time for record in LogReader().records(log)] == [1.0, 2.0]


def test_lines_read_many_at_a_time_are_what_they_are_one_by_one():
    good, event = (
        b"".join(lines(Job(ranks=2).steps(3))), b'{"type":"event","time":1,"event":"gc"}\n',
    )  # fmt: skip
    strange = b'{"event":\n', good[:40] + b"\n", b"\n", good.replace(b"\n", b"", 1), b"[1]\n"
    end = b'{"type":"clock","time":'
    log = b"".join([good, event, good, event, event, *strange, good, event, *strange, end])
    at_once, one_by_one = LogReader(), LogReader()
    records = list(at_once.records([log]))
    assert records == list(one_by_one.records(io.BytesIO(log)))
    assert len(records) == 3 * 6 + 2 * 4 + 4
    assert at_once.complaint() == one_by_one.complaint()
    assert (at_once.bad.total(), at_once.first_bad and at_once.first_bad[0]) == (8, 16)


def test_lines_come_as_soon_as_they_are_written():
    reader, writer = os.pipe()
    with open(reader, "rb") as log:
        blocks = read_lines(Path(f"/dev/fd/{reader}"))
        os.write(writer, b"one\ntw")
        assert next(blocks) == b"one\n"
        os.write(writer, b"o\n\nthree")
        assert next(blocks) == b"two\n\n"
        os.close(writer)
        assert list(blocks) == [b"three"]
        assert not log.closed


ENDLESS = itertools.repeat("noise\n")


@pytest.mark.parametrize("log", [[], ["hello\n"] * 10, ["[1]\n"], [b"\x00\x01\n"], ENDLESS])
def test_a_file_that_is_no_telemetry_log_is_a_usage_error(log):
    with pytest.raises(UsageError, match="100 bad lines" if log is ENDLESS else "telemetry log"):
        list(LogReader().records(log))
