"""Follows fields of the driver while something else goes on, and what their growth says."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu import nvml

_UINT32 = 2**32


@dataclass(slots=True)
class Followed:
    """Readings of each field: (monotonic seconds, value); ``None``: refused."""

    readings: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    codes: dict[int, str] = field(default_factory=dict)

    def growth(self, number: int) -> dict[str, Any]:
        """Of one field over the whole time: as it is, and with each fall taken as a 32-bit wrap."""
        readings = self.readings.get(number, [])
        if len(readings) < 2:
            return {"code": self.codes.get(number, "no answer"), "readings": len(readings)}
        values = [value for _, value in readings]
        steps = [after - before for before, after in itertools.pairwise(values)]
        falls = sum(1 for step in steps if step < 0)
        span_s = readings[-1][0] - readings[0][0]
        unwrapped = values[-1] - values[0] + falls * _UINT32
        return {
            "code": "success",
            "readings": len(readings),
            "span_s": round(span_s, 3),
            "first": values[0],
            "last": values[-1],
            "highest": max(values),
            "above_32_bits": max(values) >= _UINT32,
            "falls": falls,
            "changes": sum(1 for step in steps if step),
            "growth": values[-1] - values[0],
            "growth_per_s": round((values[-1] - values[0]) / span_s, 3),
            "growth_if_32_bits": unwrapped,
        }

    def integral(self, number: int) -> float | None:
        """Over time, by trapezoids: of mW in mJ."""
        readings = self.readings.get(number, [])
        if len(readings) < 2:
            return None
        return sum(
            (end - begin) * (before + after) / 2
            for (begin, before), (end, after) in itertools.pairwise(readings)
        )


@contextlib.contextmanager
def following(
    handle: Any, fields: Sequence[int | tuple[int, int]], interval_s: float
) -> Iterator[Followed]:
    """What is read in a thread of its own until the end of the block."""
    followed, stop = Followed(), threading.Event()

    def follow() -> None:
        while not stop.wait(interval_s):
            _read(handle, fields, followed)

    thread = threading.Thread(target=follow, daemon=True)
    _read(handle, fields, followed)
    thread.start()
    try:
        yield followed
    finally:
        stop.set()
        thread.join(5)
    _read(handle, fields, followed)


def _read(handle: Any, fields: Sequence[int | tuple[int, int]], followed: Followed) -> None:
    answers = nvml.read_fields(handle, fields)
    now = time.monotonic()
    for answer in answers:
        number = answer["field"]
        followed.codes[number] = answer["code"]
        if answer.get("value") is not None:
            followed.readings.setdefault(number, []).append((now, float(answer["value"])))
