"""Defines the buckets of a server's latencies."""

from __future__ import annotations


def _bounds() -> tuple[float, ...]:
    """Return bounds that show a change of 10 % between 1 and 100 ms, and of half above."""
    bounds = [0.001]
    while bounds[-1] < 100.0:
        bounds.append(float(f"{bounds[-1] * (1.1 if bounds[-1] < 0.1 else 1.5):.3g}"))
    return tuple(bounds)


# Upper bounds in seconds of time to first token, inter-token time and queue time.
LATENCY_BOUNDS_S = _bounds()
