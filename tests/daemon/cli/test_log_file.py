"""Telemetry logs as they lie on disks: packed, half-written, with lines that are no record."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.detection.streams import Job
from warpwatch_daemon.cli.log_file import LogReader, read_lines
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.log import encode
from warpwatch_telemetry.records import Record


def lines(records: Iterable[Record]) -> list[bytes]:
    return [json.dumps(encode(record)).encode() + b"\n" for record in records]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(lines(Job(ranks=2).steps(500))))
    return path


def test_a_packed_log_reads_as_the_plain_one(log: Path) -> None:
    packed = log.with_name("log")
    packed.write_bytes(gzip.compress(log.read_bytes()))
    assert b"".join(read_lines(packed)) == b"".join(read_lines(log))


def test_a_packed_log_that_is_still_written_ends_cleanly(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = gzip.compress(log.read_bytes())
    cut = log.with_name("cut.gz")
    cut.write_bytes(packed[: len(packed) // 2])
    reader = LogReader()
    assert len(list(reader.records(read_lines(cut)))) > 100
    assert reader.complaint() == ""


def test_a_packed_file_that_is_broken_is_a_usage_error(log: Path) -> None:
    broken = log.with_name("broken.gz")
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
    records = list(at_once.records([log]))
    assert records == list(one_by_one.records(io.BytesIO(log)))
    assert len(records) == 3 * 6 + 2 * 4 + 4
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


@pytest.mark.parametrize("log", [[], ["hello\n"] * 10, ["[1]\n"], ["{}\n"] * 1000, [b"\x00\x01\n"]])
def test_a_file_that_is_no_telemetry_log_is_a_usage_error(log: list[str | bytes]) -> None:
    with pytest.raises(UsageError, match="no telemetry log"):
        list(LogReader().records(log))


def test_reading_gives_up_on_an_endless_strange_file() -> None:
    def endless() -> Iterator[str]:
        while True:
            yield "noise\n"

    with pytest.raises(UsageError, match="100 bad lines"):
        list(LogReader().records(endless()))
