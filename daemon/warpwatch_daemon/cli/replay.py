"""`warpwatch replay`: run the detectors over a telemetry log."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import itertools
import json
import math
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

from warpwatch_daemon.config import Config
from warpwatch_detection.anomalies.tracked import Suppressed
from warpwatch_detection.detector import SHARES, DetectorStatus
from warpwatch_detection.replay import LogReplay
from warpwatch_runtime import command_line, loading
from warpwatch_runtime.command_line import ProgressLines, say
from warpwatch_runtime.loading import parse_value
from warpwatch_telemetry.anomalies import KINDS, Anomaly, Detected, scope_of
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.log import Decoder
from warpwatch_telemetry.records import Record

# A file that begins with this many other lines is not a telemetry log.
MAX_STRANGE_LINES = 100
MAX_REASONS = 20
_GZIP_MAGIC = b"\x1f\x8b"
BLOCK_SIZE = 1 << 16
# The errors of a line that is not a record.
_UNREADABLE = (ValueError, RecursionError, OverflowError)


def read_lines(
    path: Path, moved: Callable[[int, int], None] = lambda at, size: None
) -> Iterator[bytes]:
    """Yield blocks of whole lines of a log, also of gzip, or of standard input for ``-``.

    Only the last line may lack its end. ``moved`` gets the bytes read and the size of a file.
    Raises UsageError if the log cannot be read.
    """
    try:
        if str(path) == "-":
            yield from _whole_lines(_unpacked(cast(io.BufferedReader, sys.stdin.buffer)))
        else:
            with path.open("rb") as plain:
                size = os.fstat(plain.fileno()).st_size if plain.seekable() else 0
                for lines in _whole_lines(_unpacked(plain)):
                    yield lines
                    if size:
                        moved(plain.tell(), size)
    except (OSError, zlib.error) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _unpacked(plain: io.BufferedReader) -> Iterator[bytes]:
    """Yield blocks of a file, also of a gzip file that is still being written."""
    packed = plain.peek(2)[:2] == _GZIP_MAGIC
    file = gzip.GzipFile(fileobj=plain) if packed else plain
    with contextlib.suppress(EOFError):
        while block := file.read1(BLOCK_SIZE):
            yield block


def _whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    begun: list[bytes] = []
    for block in blocks:
        whole, end, rest = block.rpartition(b"\n")
        if end:
            yield b"".join((*begun, whole, end))
            begun.clear()
        begun.append(rest)
    if last := b"".join(begun):
        yield last


class LogReader:
    """Reads records from lines; ``bad`` counts other lines by reason.

    A last line without its end is still being written: it counts only if it is a record already.
    """

    def __init__(self) -> None:
        self.good = 0
        self.bad: Counter[str] = Counter()
        self.first_bad: tuple[int, str] | None = None
        self._decoder = Decoder()
        self._lines = 0
        self._unfinished: tuple[int, Exception] | None = None

    def records(self, lines: Iterable[str | bytes]) -> Iterator[Record]:
        """Yield the records of blocks of lines. Raises UsageError if there is none."""
        return itertools.chain.from_iterable(self._blocks(lines))

    def _blocks(self, lines: Iterable[str | bytes]) -> Iterator[Iterable[Record]]:
        self._decoder, self._lines, self._unfinished = Decoder(), 0, None
        for some in lines:
            for part in _parts(some if isinstance(some, bytes) else some.encode(errors="replace")):
                if self._unfinished:
                    self._reject(*self._unfinished)
                    self._unfinished = None
                try:
                    records = self._decoder.decode_lines(part)
                except _UNREADABLE:
                    yield self._one_by_one(part)
                    continue
                self._lines += len(records)
                self.good += len(records)
                yield records
        if not self.good:
            if self._unfinished:
                self._reject(*self._unfinished)
            raise UsageError("not a telemetry log: " + (self.complaint() or "it is empty"))

    def _one_by_one(self, lines: bytes) -> Iterator[Record]:
        for line in io.BytesIO(lines):
            self._lines += 1
            try:
                record = self._decoder.decode_line(line)
            except _UNREADABLE as error:
                if line[-1:] != b"\n":
                    self._unfinished = self._lines, error
                elif line.strip():
                    self._reject(self._lines, error)
                continue
            self.good += 1
            yield record

    def complaint(self) -> str:
        """Return one line about the bad lines, empty without any."""
        if self.first_bad is None:
            return ""
        number, text = self.first_bad
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.bad.most_common(4))
        return f"{self.bad.total()} bad lines ({reasons}), the first is line {number}: {text}"

    def _reject(self, number: int, error: Exception) -> None:
        text = " ".join(str(error).split())[:200]
        reason = "not JSON" if isinstance(error, json.JSONDecodeError) else ""
        reason = reason or text.partition(":")[0][:40]
        if reason not in self.bad and len(self.bad) >= MAX_REASONS:
            reason = "other"
        self.bad[reason] += 1
        self.first_bad = self.first_bad or (number, text)
        if not self.good and self.bad.total() >= MAX_STRANGE_LINES:
            raise UsageError(f"not a telemetry log: {self.complaint()}")


def _parts(lines: bytes) -> Iterator[bytes]:
    """Yield parts of the lines that hold only events, or none, which are read in another way."""
    begin = 0
    while (found := lines.find(b'"event"', begin)) >= 0:
        event = max(begin, lines.rfind(b"\n", begin, found) + 1)
        if event > begin:
            yield lines[begin:event]
        begin = lines.find(b"\n", found) + 1 or len(lines)
        yield lines[event:begin]
    if begin < len(lines):
        yield lines[begin:]


# The form of an anomaly in `replay --json`.
_ANOMALY_FIELDS = (
    "time", "kind", "severity", "job", "rank", "device", "step", "begin_step", "value", "baseline",
    "summary",
)  # fmt: skip
# Whether a kind and a job are shown.
Shown = Callable[[str, str | None], bool]


def main(argv: Sequence[str]) -> int:
    arguments = _arguments(argv)
    shown = _filter(arguments.job, arguments.kind)
    config = _configured(arguments.config, arguments.settings)
    replay = LogReplay(config.detection, config.anomalies, explain=arguments.explain)
    reader = LogReader()
    found = 0
    lines = read_lines(arguments.log, partial(ProgressLines().show, arguments.log.name))
    for anomaly in replay.run(reader.records(lines), arguments.at, arguments.job):
        if shown(anomaly.kind, anomaly.job):
            found += 1
            say(line(anomaly, arguments.json))
    if complaint := reader.complaint():
        say(f"warpwatch: {complaint}", sys.stderr)
    if arguments.explain:
        per_job_day = config.detection.false_alarms_per_job_day
        for text in explanation(replay, shown, arguments.json, per_job_day):
            say(text)
    return 1 if found else 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    command = command_line.parser(
        "replay",
        "Run the detectors over a telemetry log (the jsonl exporter's file, or that packed by\n"
        "gzip) in event time. Exit 1 when anomalies were found.",
        "warpwatch replay run.jsonl --explain --set detection.false_alarms_per_job_day=0.1",
    )
    command.add_argument("log", type=Path, help="a telemetry log; - for standard input")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="a configuration key, such as detection.hang.timeout_s=60",
    )
    command.add_argument(
        "--explain",
        action="store_true",
        help="say besides how each detector saw each job, rank and device: why it fired or not",
    )
    command.add_argument("--job", help="show only this job")
    command.add_argument("--kind", choices=KINDS, metavar="KIND", help="show only this kind")
    command.add_argument(
        "--at",
        type=float,
        metavar="STEP|TIME",
        help="stop before this step (of --job, by default of any job), or this time (wall clock, "
        "seconds)",
    )
    command_line.add_config(command)
    command_line.add_json(command)
    return command.parse_args(argv)


def _filter(job: str | None, kind: str | None) -> Shown:
    """Return the filter; entries without a job are shown only without ``job``."""
    return lambda its_kind, its_job: kind in (None, its_kind) and job in (None, its_job)


def line(anomaly: Anomaly, as_json: bool) -> str:
    """Return an anomaly as text or as a document, whose unknown values are null."""
    if as_json:
        known = {name: getattr(anomaly, name) for name in _ANOMALY_FIELDS}
        return json.dumps({**known, "scope": scope_of(anomaly.kind), **_whose(anomaly)})
    where = str(anomaly.job or anomaly.device)
    where += "" if anomaly.step is None else f" step {anomaly.step}"
    return f"{anomaly.time:.3f} {anomaly.severity} {anomaly.kind} {where}: {anomaly.summary}"


def _whose(found: Detected) -> dict[str, Any]:
    return {"owner": found.owner or None, "run": found.run or None}


def explanation(
    replay: LogReplay, shown: Shown, as_json: bool, per_job_day: float
) -> Iterator[str]:
    """Yield a line for each suppressed finding, each status and each budget of false alarms."""
    suppressed = [one for one in replay.suppressed() if shown(one.kind, one.found.job)]
    statuses = [one for one in replay.statuses() if shown(one[0], one[1].job)]
    judged = {kind for kind, _ in statuses}
    given = {kind: share * per_job_day for kind, share in SHARES.items() if kind in judged}
    if as_json:
        yield from map(json.dumps, _documents(suppressed, statuses, given))
        return
    for one in suppressed:
        where = _where(one.found.job, one.found.device, one.found.rank)
        since = f"suppressed since {one.since:.3f} by {one.cause}"
        yield f"{one.kind} of {where}: {since}: {one.found.summary}"
    for kind, status in statuses:
        where = _where(status.job, status.device, status.rank)
        yield f"{kind} of {where}: {status.answer}: {status.text}"
    for kind, a_day in given.items():
        yield f"{kind}: its limits allow a job {a_day:.3g} false alarms per day"


def _documents(
    suppressed: Iterable[Suppressed],
    statuses: Iterable[tuple[str, DetectorStatus]],
    given: Mapping[str, float],
) -> Iterator[dict[str, Any]]:
    """Yield the forms of ``replay --explain --json``; unknown values are null."""
    for one in suppressed:
        found = one.found
        yield {
            "type": "suppressed", "kind": one.kind, "job": found.job, "rank": found.rank,
            "cause": one.cause, "since": one.since, "summary": found.summary, **_whose(found),
        }  # fmt: skip
    for kind, status in statuses:
        known = {name: _finite(value) for name, value in asdict(status).items()}
        yield {"type": "reading", "kind": kind, **known}
    for kind, a_day in given.items():
        yield {"type": "budget", "kind": kind, "false_alarms_per_job_day": a_day}


def _where(job: str | None, device: str | None, rank: int | None) -> str:
    return f"{job or device}{'' if rank is None else f' rank {rank}'}"


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _configured(path: Path | None, settings: list[str]) -> Config:
    tree = loading.as_tree(loading.load(Config, path))
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator:
            raise UsageError(f"--set {setting!r}: KEY=VALUE is needed")
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise UsageError(f"--set {key}: {parent} is not a section")
        node[leaf] = parse_value(text)
    return loading.parse(Config, tree, "--set")
