"""The middle of a few values, and what its noise says of theirs."""

from __future__ import annotations

from collections.abc import Sequence

# A normal distribution's standard deviation over its median absolute deviation.
SIGMA_PER_MAD = 1.4826


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
