"""Why a replay found what it found, and why not more: tables for people, objects for programs."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from warpwatch_detection.anomalies.episodes import Shadow
from warpwatch_detection.detectors.base import Reading
from warpwatch_telemetry.anomalies import Anomaly

WIDTH = 100
_WHERE_WIDTH = 22
_INDENT = "    "
_NOTHING = "-"


def reading_to_json(kind: str, reading: Reading) -> dict[str, Any]:
    """The reading as ``replay --explain --json`` shows it; what is unknown is null."""
    known = {name: _finite(value) for name, value in asdict(reading).items()}
    return {"type": "reading", "kind": kind, **known}


def suppressed_to_json(shadow: Shadow) -> dict[str, Any]:
    """What was found and not raised, and since when (wall clock, seconds)."""
    names = ("kind", "job", "rank", "cause", "since", "summary")
    return {"type": "suppressed", **{name: getattr(shadow, name) for name in names}}


def lines(
    anomalies: Sequence[Anomaly],
    suppressed: Sequence[Shadow],
    readings: Sequence[tuple[str, Reading]],
) -> Iterator[str]:
    """At most WIDTH wide: what was found, what had a cause that was told, what was judged how."""
    yield from _block(
        ("found", "of", "began", "told", "value", "baseline", "over"),
        [_evidence(anomaly) for anomaly in anomalies],
        [anomaly.summary for anomaly in anomalies],
    )
    yield from _block(
        ("suppressed", "of", "cause", "since"),
        [
            (one.kind, _where(one.job, one.rank), one.cause, f"{one.since:.3f}")
            for one in suppressed
        ],
        [shadow.summary for shadow in suppressed],
    )
    yield from _block(
        ("judged", "of", "answer", "value", "baseline", "limit", "nearest"),
        [_judgement(kind, reading) for kind, reading in readings],
        [reading.text for _, reading in readings],
    )


def _block(
    head: tuple[str, ...], rows: Sequence[tuple[str, ...]], texts: Sequence[str]
) -> Iterator[str]:
    """A table of aligned columns, with a sentence under each row."""
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    yield ""
    yield _row(head, widths)
    for row, text in zip(rows, texts, strict=True):
        yield _row(row, widths)
        yield from textwrap.wrap(text, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)


def _row(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded).rstrip()[:WIDTH]


def _evidence(anomaly: Anomaly) -> tuple[str, ...]:
    over = "active" if anomaly.end_time is None else f"{anomaly.end_time:.3f}"
    return (
        anomaly.kind,
        _where(anomaly.job or anomaly.device, anomaly.rank),
        _number(anomaly.begin_step),
        _number(anomaly.step),
        _number(anomaly.value),
        _number(anomaly.baseline),
        over,
    )


def _judgement(kind: str, reading: Reading) -> tuple[str, ...]:
    nearest = _number(reading.nearest)
    if reading.nearest is not None and reading.nearest_step is not None:
        nearest = f"{reading.nearest:.2f} at {reading.nearest_step}"
    return (
        kind,
        _where(reading.job or reading.device, reading.rank),
        reading.answer,
        _number(reading.value),
        _number(reading.baseline),
        _number(reading.limit),
        nearest,
    )


def _where(job_or_device: str | None, rank: int | None) -> str:
    name, suffix = job_or_device or "", "" if rank is None else f" rank {rank}"
    room = _WHERE_WIDTH - len(suffix)
    return (name if len(name) <= room else name[: room - 1] + "…") + suffix


def _number(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return str(value) if isinstance(value, int) and abs(value) < 10**8 else f"{value:.4g}"


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
