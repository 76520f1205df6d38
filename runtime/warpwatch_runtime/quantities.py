"""Formats numbers with units for people."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from warpwatch_telemetry.state import PARALLELISM

NO_VALUE = "\N{EN DASH}"
MAX_TEXT = 120
_PREFIXES = ("", "k", "M", "G", "T", "P")


def text(value: object, limit: int = MAX_TEXT) -> str:
    """Return one line of at most ``limit`` printable characters."""
    line = str(value)[: limit + 1]
    if not line.isprintable():
        line = "".join(char if char.isprintable() else " " for char in line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def sentence(value: object, limit: int) -> str:
    """Return the text with a capital letter first."""
    line = text(value, limit)
    return line[:1].upper() + line[1:]


def seconds(value: float | None) -> str:
    """Return a duration with three digits: 0.21234 is ``212 ms``."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    if abs(value) < 0.0009995:
        return f"{_three_digits(value * 1e6)} µs"
    if abs(value) < 0.9995:
        return f"{_three_digits(value * 1e3)} ms"
    if value < 120:
        return f"{_three_digits(value)} s"
    return _long(value)


def gibibytes(value: float | None) -> str:
    return NO_VALUE if value is None else f"{_three_digits(value / 2**30)} GiB"


def percent(ratio: float | None) -> str:
    return NO_VALUE if ratio is None or not math.isfinite(ratio) else f"{ratio * 100:.0f} %"


def joules(value: float) -> str:
    """Return energy with a prefix: 12345 is ``12.3 kJ``."""
    number, prefix = _scaled(value)
    return f"{number} {prefix}J"


def tokens_per_joule(value: float) -> str:
    """Return the rate with a prefix: 0.0123 is ``0.0123 tokens/J``."""
    number, prefix = _scaled(value)
    return f"{value:.3g} tokens/J" if value < 1 else f"{number}{prefix} tokens/J"


def rate(value: float, what: str) -> str:
    """Return a rate with a prefix: 12345 is ``12.3k tokens/s``."""
    number, prefix = _scaled(value)
    return f"{number}{prefix} {what}/s"


def ago(then: float, now: float) -> str:
    """Return how long ago it was. Both times are wall clock in seconds."""
    passed = now - then
    return "now" if passed < 2 else f"{_long(passed)} ago"


def timestamp(value: float) -> str:
    """Return ISO 8601 in UTC, for ``<time datetime>``; empty for an invalid time."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(value))
    except (OverflowError, ValueError, OSError):
        return ""


def no_step(calls: int) -> str:
    """Explain training without a step; ``calls``: of backward and optimizers."""
    return (
        f"no end of a step seen in {calls} backwards and optimizer steps; "
        "put `with warpwatch.attach().step():` around a step"
    )


def uncounted(steps: int) -> str:
    """Report steps of threads that trained beside the training thread."""
    return (
        f"{steps} steps of other threads are not counted; "
        "train in a process each (Optuna: several processes with n_jobs=1 and one storage)"
    )


def places(parallel: Mapping[str, Sequence[int]]) -> str:
    """Return a rank's places in each kind of parallelism: ``DP 1 of 2, TP 0 of 4``."""
    known = ((short, parallel.get(kind, (0, 1))) for kind, short in PARALLELISM.items())
    return ", ".join(f"{short} {place} of {size}" for short, (place, size) in known if size > 1)


def plural(count: int, word: str, words: str = "") -> str:
    return f"{count} {word if count == 1 else words or word + 's'}"


def _scaled(value: float) -> tuple[str, str]:
    steps = 0
    while abs(value) >= 999.5 and steps < len(_PREFIXES) - 1:
        value /= 1000
        steps += 1
    return _three_digits(value), _PREFIXES[steps]


def _three_digits(value: float) -> str:
    size = abs(value)
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    shown = f"{value:.{digits}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def _long(value: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= 2 * size:
            return f"{int(value // size)} {unit}"
    return f"{int(value)} s"
