"""Provides sets of time as sorted, disjoint intervals: shares are unions, not sums of durations."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

# Begin and end in µs.
Interval = tuple[float, float]
Intervals = list[Interval]


def union(intervals: Iterable[Interval]) -> Intervals:
    """Return the union of intervals; touching ones become one, empty ones vanish."""
    return merge(sorted(intervals))


def merge(intervals: Iterable[Interval]) -> Intervals:
    """Return the union of intervals that are sorted by begin."""
    merged: Intervals = []
    low = high = -math.inf
    for begin, end in intervals:
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


def longest_us(intervals: Iterable[Interval]) -> float:
    return max((end - begin for begin, end in intervals), default=0.0)


def clip(intervals: Iterable[Interval], window: Interval) -> Intervals:
    low, high = window
    return [
        (begin if begin > low else low, end if end < high else high)
        for begin, end in intervals
        if begin < high and end > low
    ]


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """Return the intersection of two unions."""
    shared: Intervals = []
    first, count = 0, len(right)
    for begin, end in left:
        while first < count and right[first][1] <= begin:
            first += 1
        index = first
        while index < count and right[index][0] < end:
            low, high = right[index]
            shared.append((low if low > begin else begin, high if high < end else end))
            index += 1
    return shared


def difference(left: Intervals, right: Intervals) -> Intervals:
    """Return the part of the union ``left`` that is not in the union ``right``."""
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
    """Return the µs of the union in each of ``windows``, which may overlap."""
    begins = [begin for begin, _ in intervals]
    passed_us = list(accumulate((end - begin for begin, end in intervals), initial=0.0))

    def before_us(at_us: float) -> float:
        index = bisect_left(begins, at_us) - 1
        if index < 0:
            return 0.0
        begin, end = intervals[index]
        return passed_us[index] + (end if end < at_us else at_us) - begin

    return [before_us(high) - before_us(low) if low < high else 0.0 for low, high in windows]
