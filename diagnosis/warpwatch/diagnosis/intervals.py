"""Sets of time as sorted, disjoint intervals: every share is a union, never a sum of durations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# Begin and end in µs.
Interval = tuple[float, float]
Intervals = list[Interval]


def union(intervals: Iterable[Interval]) -> Intervals:
    """Touching intervals become one; empty ones vanish."""
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def clip(intervals: Iterable[Interval], window: Interval) -> Iterator[Interval]:
    low, high = window
    for begin, end in intervals:
        if begin < high and end > low:
            yield max(begin, low), min(end, high)


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """What two unions share."""
    shared: Intervals = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            shared.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared


def difference(left: Intervals, right: Intervals) -> Intervals:
    """What of the union ``left`` is not in the union ``right``."""
    rest: Intervals = []
    j = 0
    for begin, end in left:
        while j < len(right) and right[j][1] <= begin:
            j += 1
        k = j
        while k < len(right) and right[k][0] < end:
            if right[k][0] > begin:
                rest.append((begin, right[k][0]))
            begin = max(begin, right[k][1])
            k += 1
        if begin < end:
            rest.append((begin, end))
    return rest
