"""Restarts of the daemon, as the engine sees them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tests.detection.streams import detection, fed
from warpwatch_detection.anomalies import snapshot
from warpwatch_detection.engine import Detection
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.records import RankSeen, Record, Step

# What the rendezvous reads again of every rank.
REWIND = 200


def restarted(engine: Detection, now: float, **sections: Any) -> tuple[Detection, list[Anomaly]]:
    """The next daemon's engine, and what the restart closed."""
    body = snapshot.take(engine.parts())
    fresh = detection(**sections)
    saved = msgspec.msgpack.decode(body, type=snapshot.Snapshot)
    kinds = snapshot.give_back(saved, fresh.parts())
    return fresh, [change.anomaly for change in fresh.resume(now, kinds)]


def again(records: list[Record]) -> list[Record]:
    """What a new daemon reads of rings that it has read before."""
    seen = [record for record in records if isinstance(record, RankSeen)]
    steps = [record for record in records if isinstance(record, Step)]
    return [*seen, *steps[-REWIND:]]


def lives(engine: Detection, records: Iterable[Record], every: int = 0) -> list[tuple[Any, ...]]:
    """Kind, id, rank, begin and end of every anomaly; a restart after each ``every`` records."""
    reported: dict[str, tuple[Any, ...]] = {}
    read: list[Record] = []
    for number, record in enumerate(records, 1):
        read.append(record)
        changes = fed(engine, [record])
        if every and number % every == 0:
            engine, closed = restarted(engine, read[-1].time)
            assert closed == []
            changes += fed(engine, again(read))
        for one in changes:
            reported[one.id] = (one.kind, one.id, one.rank, one.begin_step, one.end_time)
    return list(reported.values())
