"""Replay of logs as they lie on disks: packed, half-written, ended, explained."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.detection.streams import EPOCH_S, Job
from warpwatch_daemon.cli import explanation, main
from warpwatch_detection.anomalies.register_state import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_detection.replay import LogReader, Replay, read_lines
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.log import encode
from warpwatch_telemetry.records import End, Record


def lines(records: Iterable[Record]) -> list[bytes]:
    return [json.dumps(encode(record)).encode() + b"\n" for record in records]


def slow_rank(steps: int = 300) -> Iterator[Record]:
    """Rank 1 of two is slow from step 500 on; then the job ends."""
    job = Job(ranks=2, step_s=0.5, noise=0.02)
    yield from job.seen()
    yield from job.steps(500)
    yield from job.steps(steps, compute=lambda _, rank: 0.2 if rank == 1 else 0.0)
    yield End(job.time, "llama")


@pytest.fixture(scope="module")
def slow_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "slow.jsonl"
    path.write_bytes(b"".join(lines(slow_rank())))
    return path


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_packed_log_reads_as_the_plain_one(slow_log: Path) -> None:
    packed = slow_log.with_name("log")
    packed.write_bytes(gzip.compress(slow_log.read_bytes()))
    assert b"".join(read_lines(packed)) == b"".join(read_lines(slow_log))


def test_a_packed_log_that_is_still_written_ends_cleanly(
    slow_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = gzip.compress(slow_log.read_bytes())
    cut = slow_log.with_name("cut.gz")
    cut.write_bytes(packed[: len(packed) // 2])
    reader = LogReader()
    assert len(list(reader.records(read_lines(cut)))) > 100
    assert reader.complaint() == ""


def test_a_log_on_standard_input_may_be_packed(
    slow_log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = io.BytesIO(gzip.compress(slow_log.read_bytes()))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(packed)))
    assert main(["replay", "-", "--json"]) == 1
    assert [json.loads(line)["kind"] for line in told(capsys)] == ["straggler"]


def test_a_packed_file_that_is_broken_is_a_usage_error(slow_log: Path) -> None:
    broken = slow_log.with_name("broken.gz")
    broken.write_bytes(b"\x1f\x8b" + bytes(range(200)))
    with pytest.raises(UsageError, match=r"broken\.gz: "):
        list(read_lines(broken))


def test_a_half_written_last_line_is_not_counted_but_one_in_the_middle_is() -> None:
    job = Job(ranks=1)
    reader = LogReader()
    log = [*lines(job.steps(2)), b'{"type":"step","ti']
    assert len(list(reader.records(log))) == 2
    assert reader.complaint() == ""
    log = [*log, *lines(job.steps(1))]
    assert len(list(reader.records(log))) == 3
    assert reader.complaint().startswith("1 bad lines (not JSON 1), the first is line 3: ")


def test_lines_read_many_at_a_time_are_what_they_are_one_by_one() -> None:
    good, event = (
        b"".join(lines(Job(ranks=2).steps(3))),
        b'{"type":"event","time":1,"event":"gc"}\n',
    )
    strange = b'{"event":\n', good[:40] + b"\n", b"\n", good.replace(b"\n", b"", 1), b"[1]\n"
    end = b'{"type":"clock","time":'
    log = b"".join([good, event, good, event, event, *strange, good, event, *strange, end])
    at_once, one_by_one = LogReader(), LogReader()
    told = list(at_once.records([log]))
    assert told == list(one_by_one.records(io.BytesIO(log)))
    assert len(told) == 3 * 6 + 2 * 4 + 4
    assert at_once.complaint() == one_by_one.complaint()
    assert (at_once.bad.total(), at_once.first_bad and at_once.first_bad[0]) == (8, 16)


def test_lines_come_as_soon_as_they_are_written() -> None:
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


def test_a_last_line_that_lacks_only_its_end_is_a_record() -> None:
    log = [b'{"type":"clock","time":1}\n', b'{"type":"clock","time":2}']
    assert [record.time for record in LogReader().records(log)] == [1.0, 2.0]


def test_a_replay_stops_before_a_step_or_a_time() -> None:
    log = lines(slow_rank())
    assert [a.kind for a in Replay().run(log)] == ["straggler"]
    assert list(Replay().run(log, until=500)) == []
    assert list(Replay().run(log, until=EPOCH_S + 100)) == []


def test_what_a_replay_found_is_kept_with_its_end() -> None:
    replay = Replay()
    (found,) = list(replay.run(lines(slow_rank())))
    assert replay.anomalies[found.id].end_time is not None
    assert found.end_time is None


def test_readings_of_an_ended_job_are_those_at_its_end(
    slow_log: Path,
) -> None:
    replay = Replay(explain=True)
    list(replay.run(read_lines(slow_log)))
    found = {kind: reading for kind, reading in replay.statuses() if reading.answer == "found"}
    assert found.keys() == {"straggler"}
    assert (found["straggler"].job, found["straggler"].rank) == ("llama", 1)


def test_explain_keeps_anomalies_as_they_are_and_adds_readings(
    slow_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(slow_log), "--json"]) == 1
    plain = told(capsys)
    assert main(["replay", str(slow_log), "--json", "--explain"]) == 1
    explained = told(capsys)
    assert explained[: len(plain)] == plain
    more = [json.loads(line) for line in explained[len(plain) :]]
    statuses = [line for line in more if line["type"] == "reading"]
    assert {line["type"] for line in more} <= {"reading", "suppressed"}
    assert {"answer", "value", "baseline", "limit", "nearest", "text"} <= statuses[0].keys()


def test_only_the_asked_kind_and_job_are_shown(
    slow_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(slow_log), "--explain", "--json", "--kind", "hang"]) == 0
    assert {json.loads(line)["kind"] for line in told(capsys)} <= {"hang"}
    assert main(["replay", str(slow_log), "--explain", "--json", "--job", "other"]) == 0
    assert told(capsys) == []


def test_an_explanation_is_a_table_that_fits_its_width() -> None:
    name = "a-job-with-a-name-that-is-much-too-long-for-any-table"
    device = "GPU-00000000-0000-0000-0000-000000000000"
    anomalies = [
        Anomaly("1", EPOCH_S, "straggler", "warning", "slow", name, 1023, None, 412, 400, 0.6, 0.5),
        Anomaly("2", EPOCH_S, "ecc_uncorrectable", "critical", "bad", device=device, end_time=2e9),
    ]
    suppressed = [Suppressed("step_regression", "llama", None, "straggler", "1", EPOCH_S, "slower")]
    statuses = [
        (
            "step_regression",
            DetectorStatus("fine", "so " * 60, name, 7, None, 1 / 3, -1e-10, 4e10, 0.31, 1234567),
        ),
        ("hang", DetectorStatus("learning", "3 of 5 steps seen", "llama")),
    ]
    table = list(explanation.lines(anomalies, suppressed, statuses))
    assert max(map(len, table)) <= 100
    assert table[1].split() == ["found", "of", "began", "told", "value", "baseline", "over"]
    assert table[2].split() == [
        "straggler", "a-job-with-…", "rank", "1023", "400", "412", "0.6", "0.5", "active",
    ]  # fmt: skip
    assert table[3] == "    slow"
    assert table[7].split() == ["suppressed", "of", "cause", "since"]
    assert table[8].split() == ["step_regression", "llama", "straggler", "1700000000.000"]
    assert "0.31 at 1234567" in table[12]
    assert table[-2].split() == ["hang", "llama", "learning", "-", "-", "-", "-"]
    assert table[-1] == "    3 of 5 steps seen"


def test_what_a_cause_explains_is_told_as_suppressed() -> None:
    job = Job(ranks=2, step_s=0.5, noise=0.02)
    records = [*job.steps(500), *job.steps(100, wait=lambda *_: 0.3)]
    records += job.steps(100, wait=lambda *_: 0.3, compute=lambda *_: 0.2)
    replay = Replay(explain=True)
    assert [anomaly.kind for anomaly in replay.run(lines(records))] == ["data_stall"]
    told = {(shadow.kind, shadow.cause) for shadow in replay.suppressed()}
    assert ("step_regression", "data_stall") in told


def test_an_unbounded_number_is_null_in_json() -> None:
    reading = DetectorStatus("learning", "no limit yet", "llama", limit=float("inf"))
    assert explanation.status_to_json("hang", reading)["limit"] is None
    assert json.loads(json.dumps(explanation.status_to_json("hang", reading)))["kind"] == "hang"


def test_a_job_name_that_no_terminal_can_show_is_written_escaped(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log = tmp_path / "strange.jsonl"
    log.write_bytes(b"".join(lines(slow_rank())).replace(b'"llama"', b'"\\ud800"'))
    with (
        open(1, "w", encoding="ascii", closefd=False) as terminal,
        pytest.MonkeyPatch.context() as m,
    ):
        m.setattr("sys.stdout", terminal)
        assert main(["replay", str(log), "--explain"]) == 1
    assert b"straggler \\ud800 step" in capfdbinary.readouterr().out
