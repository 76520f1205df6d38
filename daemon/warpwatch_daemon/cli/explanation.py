"""Why a replay found what it found, and why not more: tables for people, objects for programs."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from warpwatch_detection.anomalies.register_state import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_telemetry.anomalies import Anomaly, Detected, scope_of

WIDTH = 100
_WHERE_WIDTH = 22
_INDENT = "    "
_NOTHING = "-"
# The form of an anomaly in `replay --json`.
_ANOMALY_FIELDS = (
    "time", "kind", "severity", "job", "rank", "device", "step", "begin_step", "value", "baseline",
    "summary",
)  # fmt: skip


def anomaly_to_json(anomaly: Anomaly) -> dict[str, Any]:
    """What is unknown is null."""
    known = {name: getattr(anomaly, name) for name in _ANOMALY_FIELDS}
    return {**known, "scope": scope_of(anomaly.kind), **_whose(anomaly)}


def _whose(found: Detected) -> dict[str, Any]:
    return {"owner": found.owner or None, "run": found.run or None}


def status_to_json(kind: str, status: DetectorStatus) -> dict[str, Any]:
    """The status as ``replay --explain --json`` shows it; what is unknown is null."""
    known = {name: _finite(value) for name, value in asdict(status).items()}
    return {"type": "reading", "kind": kind, **known}


def suppressed_to_json(one: Suppressed) -> dict[str, Any]:
    """What was found and not raised, and since when (wall clock, seconds)."""
    return {
        "type": "suppressed", "kind": one.kind, "job": one.found.job, "rank": one.found.rank,
        "cause": one.cause, "since": one.since, "summary": one.found.summary, **_whose(one.found),
    }  # fmt: skip


def budget_to_json(kind: str, a_day: float) -> dict[str, Any]:
    """``a_day``: the false alarms of a kind that a job may raise."""
    return {"type": "budget", "kind": kind, "false_alarms_per_job_day": a_day}


def budget_lines(given: Mapping[str, float]) -> Iterator[str]:
    """``given``: by kind, the false alarms that a job may raise a day."""
    if given:
        kinds = ", ".join(f"{kind} {a_day:.3g}" for kind, a_day in given.items())
        yield ""
        yield from textwrap.wrap(f"false alarms a job and day that limits allow: {kinds}", WIDTH)


def lines(
    anomalies: Sequence[Anomaly],
    suppressed: Sequence[Suppressed],
    statuses: Sequence[tuple[str, DetectorStatus]],
) -> Iterator[str]:
    """At most WIDTH wide: what was found, what was suppressed by its cause, what was judged how."""
    yield from _block(
        ("found", "of", "began", "raised", "value", "baseline", "over"),
        [_evidence(anomaly) for anomaly in anomalies],
        [anomaly.summary for anomaly in anomalies],
    )
    yield from _block(
        ("suppressed", "of", "cause", "since"),
        [
            (one.kind, _where(one.found.job, one.found.rank), one.cause, f"{one.since:.3f}")
            for one in suppressed
        ],
        [one.found.summary for one in suppressed],
    )
    yield from _block(
        ("judged", "of", "answer", "value", "baseline", "limit", "nearest"),
        [_judgement(kind, status) for kind, status in statuses],
        [status.text for _, status in statuses],
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


def _judgement(kind: str, status: DetectorStatus) -> tuple[str, ...]:
    nearest = _number(status.nearest)
    if status.nearest is not None and status.nearest_step is not None:
        nearest = f"{status.nearest:.2f} at {status.nearest_step}"
    return (
        kind,
        _where(status.job or status.device, status.rank),
        status.answer,
        _number(status.value),
        _number(status.baseline),
        _number(status.limit),
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
