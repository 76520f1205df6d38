"""Reads a telemetry log and says what the daemon would have found, in event time."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator

from warpwatch.daemon.config import Config
from warpwatch.daemon.detection import Detection
from warpwatch.daemon.errors import UsageError
from warpwatch.telemetry.anomalies import Anomaly
from warpwatch.telemetry.log import Decoder
from warpwatch.telemetry.records import Record

# Lines without a single record after which a file is no telemetry log.
MAX_STRANGE_LINES = 100
MAX_REASONS = 20


class LogReader:
    """Lines in, records out; ``bad`` counts the lines that are none, by reason."""

    def __init__(self) -> None:
        self.good = 0
        self.bad: Counter[str] = Counter()
        self.first_bad: tuple[int, str] | None = None

    def records(self, lines: Iterable[str | bytes]) -> Iterator[Record]:
        """Raises UsageError when nothing in ``lines`` is a telemetry record."""
        decode = Decoder().decode
        for number, line in enumerate(lines, 1):
            try:
                record = decode(json.loads(line))
            except (ValueError, RecursionError, OverflowError) as error:
                if line.strip():
                    self._reject(number, error)
                continue
            self.good += 1
            yield record
        if not self.good:
            raise UsageError("no telemetry log: " + (self.complaint() or "it is empty"))

    def complaint(self) -> str:
        """One line about the bad lines, empty if there were none."""
        if self.first_bad is None:
            return ""
        number, text = self.first_bad
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.bad.most_common(4))
        return f"{self.bad.total()} bad lines ({reasons}), the first is line {number}: {text}"

    def _reject(self, number: int, error: Exception) -> None:
        text = " ".join(str(error).split())[:200]
        reason = "not JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else ""
        reason = reason or text.partition(":")[0][:40]
        if reason not in self.bad and len(self.bad) >= MAX_REASONS:
            reason = "other"
        self.bad[reason] += 1
        self.first_bad = self.first_bad or (number, text)
        if not self.good and self.bad.total() >= MAX_STRANGE_LINES:
            raise UsageError(f"no telemetry log: {self.complaint()}")


def replay(lines: Iterable[str | bytes], config: Config) -> Iterator[Anomaly]:
    """Every anomaly as it is raised. Bad lines are left out and told in one line on stderr.

    Raises UsageError when ``lines`` hold no telemetry record at all.
    """
    reader, detection, known = LogReader(), Detection(config), set[str]()
    for record in reader.records(lines):
        for anomaly in detection.feed(record):
            if anomaly.end_time is not None:
                known.discard(anomaly.id)
            elif anomaly.id not in known:
                known.add(anomaly.id)
                yield anomaly
    if complaint := reader.complaint():
        sys.stderr.write(f"warpwatch: {complaint}\n")
