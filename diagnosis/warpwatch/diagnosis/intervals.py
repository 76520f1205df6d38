"""Sets of time as sorted, disjoint intervals: every share is a union, never a sum of durations."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

# Begin and end in µs.
Interval = tuple[float, float]
Intervals = list[Interval]


def union(intervals: Iterable[Interval]) -> Intervals:
    """Touching intervals become one; empty ones vanish."""
    merged: Intervals = []
    low = high = -math.inf
    for begin, end in sorted(intervals):
        if begin > high:
            if end > begin:
                if low < high:
                    merged.append((low, high))
                low, high = begin, end
        elif end > high:
            high = end
    if low < high:
        merged.append((low, high))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    return sum([end - begin for begin, end in intervals])


def clip(intervals: Iterable[Interval], window: Interval) -> Intervals:
    low, high = window
    return [
        (begin if begin > low else low, end if end < high else high)
        for begin, end in intervals
        if begin < high and end > low
    ]


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
    if not right:
        return [span for span in left if span[0] < span[1]]
    rest: Intervals = []
    j, count = 0, len(right)
    for begin, end in left:
        while j < count and right[j][1] <= begin:
            j += 1
        k = j
        while k < count:
            low, high = right[k]
            if low >= end:
                break
            if low > begin:
                rest.append((begin, low))
            begin = high
            k += 1
        if begin < end:
            rest.append((begin, end))
    return rest


def within(intervals: Intervals, windows: Sequence[Interval]) -> list[float]:
    """µs of the union ``intervals`` in each of ``windows``, which need not be disjoint."""
    begins = [begin for begin, _ in intervals]
    sums = []
    for low, high in windows:
        spent = 0.0
        for index in range(max(0, bisect_right(begins, low) - 1), len(intervals)):
            begin, end = intervals[index]
            if begin >= high:
                break
            spent += max(0.0, min(end, high) - max(begin, low))
        sums.append(spent)
    return sums
