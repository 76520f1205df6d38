"""The worst moment of an anomaly: which of two findings of a kind is worse, and what recovers.

How bad a finding is, is its value (``_value``), but for the kinds of ``_BADNESS``. Nothing but this
module compares findings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from warpwatch_telemetry.anomalies import EVENT_KINDS, Detected, Worst

# Below this part of its worst it recovers: far enough that noise does not say so.
RECOVERING_SHARE = 0.5

# What is judged, the graver quantity higher, and how bad it is: more is worse.
Badness = tuple[int, float]
_Of = Callable[[float, float | None], Badness]


def _value(value: float, baseline: float | None) -> Badness:
    return 0, value


def _above(value: float, baseline: float | None) -> Badness:
    return 0, value - (baseline or 0.0)


def _longer(value: float, baseline: float | None) -> Badness:
    return 0, value / baseline - 1 if baseline else value


_BADNESS: Mapping[str, _Of] = {
    "step_regression": _longer,
    "step_drift": _longer,
    "straggler": _longer,
    "step_spikes": _above,
    "comm_slow": _above,
    "data_stall": _above,
    "clock_drop": lambda value, usual: (0, 1 - value / usual if usual else -value),
    # Retries before fullness, a slow link before packets sent again, links that are down before
    # errors and these before a rate.
    "memory_pressure": lambda value, limit: (int(limit == 0), value),
    "pcie_degraded": lambda value, best: (1, 1 - value / best) if best else (0, value),
    "nvlink_error": lambda value, links: (0 if links is None else 2 if links else 1, value),
}


def _badness(kind: str, found: Detected | Worst) -> Badness:
    """Events add up, so that the newest word is the worst; so is one without a value."""
    if kind in EVENT_KINDS or found.value is None:
        return 0, math.inf
    return _BADNESS.get(kind, _value)(found.value, found.baseline)


def worse(kind: str, before: Worst | None, found: Detected, summary: str = "") -> Worst:
    """The worse of the two, of equals the newer one. ``summary``: in place of the detector's."""
    if before is not None and _badness(kind, found) < _badness(kind, before):
        return before
    said = summary or found.summary
    return Worst(found.time, said, found.step, found.value, found.baseline)


def recovers(kind: str, found: Detected, worst: Detected | Worst) -> bool:
    """Return whether what is found is far below the worst."""
    now, then = _badness(kind, found), _badness(kind, worst)
    return now < then and (now[0] != then[0] or now[1] <= RECOVERING_SHARE * then[1])


def sentence(kind: str, found: Detected, worst: Worst) -> str:
    """What is said of an active anomaly: what was found last, or that it recovers."""
    if not recovers(kind, found, worst):
        return found.summary
    at = "" if worst.step is None else f" (step {worst.step})"
    return f"recovering: now {_short(kind, found)}; at its worst{at} {worst.summary}"


def _short(kind: str, found: Detected) -> str:
    """The present state in a few words, where the kind has some."""
    value, baseline = found.value, found.baseline
    if value is not None and baseline and _BADNESS.get(kind) is _longer:
        return f"{100 * max(0.0, value / baseline - 1):.0f} % longer"
    if value is not None and kind in ("data_stall", "gc_pause"):
        return f"{100 * value:.0f} % of the time"
    if value is not None and kind == "step_spikes":
        return f"{100 * value:.0f} % of the steps"
    return found.summary
