"""Puts the records of a job's nodes into the order of their times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import msgspec

from warpwatch_telemetry.records import Record

# Records that wait for a node that is late or away, per job and per rank. The oldest are dropped:
# a job is not evaluated while a part of it is not seen.
MAX_WAITING = 200_000
MAX_WAITING_OF_RANK = 4000


class RecordMerger:
    """Sorts records: ``until`` yields them in order of time; late ones get the present time."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Record]] = []
        self._numbers = itertools.count()
        self._time = float("-inf")
        # How many the job has on its nodes.
        self.ranks = 1

    def add(self, record: Record) -> None:
        heapq.heappush(self._waiting, (record.time, next(self._numbers), record))
        if len(self._waiting) > min(MAX_WAITING, MAX_WAITING_OF_RANK * self.ranks):
            heapq.heappop(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        self._waiting.clear()

    def until(self, time: float) -> Iterator[Record]:
        while self._waiting and self._waiting[0][0] <= time:
            at, _, record = heapq.heappop(self._waiting)
            if at < self._time:
                record = msgspec.structs.replace(record, time=self._time)
            self._time = max(self._time, at)
            yield record
