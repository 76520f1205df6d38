"""Baselines for ``make judge``: textbook detectors on the job's step time, and chance.

    python -m benchmarks.baselines robust_z run.jsonl

Each reads a telemetry log and prints one anomaly a line, as ``warpwatch replay --json`` does. They
see one number a step, call everything step_regression, and start again after each alarm.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import compress
from pathlib import Path

from warpwatch_daemon.cli.replay import LogReader, read_lines
from warpwatch_telemetry.anomalies import JOB_KINDS
from warpwatch_telemetry.records import Step

WARMUP_STEPS = 20
# Standard deviation of a normal distribution over its median absolute deviation.
MAD_TO_SIGMA = 1.4826
ROBUST_Z_WINDOW, ROBUST_Z_LIMIT, ROBUST_Z_IN_A_ROW = 100, 6.0, 5
EWMA_WEIGHT, CUSUM_SLACK, CUSUM_LIMIT = 0.02, 1.5, 20.0
# A single step weighs no more than this many deviations, or one checkpoint would be an alarm.
CUSUM_MAX_Z = 10.0


def robust_z(durations_s: Iterable[float]) -> Iterator[bool]:
    """Whether five steps in a row lie 6 robust deviations above the median of 100 before."""
    window: deque[float] = deque(maxlen=ROBUST_Z_WINDOW)
    above = 0
    for duration in durations_s:
        is_above = False
        if len(window) >= ROBUST_Z_WINDOW // 2:
            middle = statistics.median(window)
            mad = statistics.median(abs(value - middle) for value in window)
            is_above = duration > middle + ROBUST_Z_LIMIT * MAD_TO_SIGMA * mad
        above = above + 1 if is_above else 0
        if not is_above:
            window.append(duration)
        if above == ROBUST_Z_IN_A_ROW:
            window.clear()
        yield above == ROBUST_Z_IN_A_ROW


def ewma_cusum(durations_s: Iterable[float]) -> Iterator[bool]:
    """Page's cumulative sum over steps standardized by exponentially weighted mean and variance."""
    mean = variance = total = 0.0
    seen = 0
    for duration in durations_s:
        seen += 1
        weight = max(EWMA_WEIGHT, 1 / seen)
        sigma = math.sqrt(variance)
        z = (duration - mean) / sigma if sigma and seen > 1 / EWMA_WEIGHT else 0.0
        z = max(-CUSUM_MAX_Z, min(CUSUM_MAX_Z, z))
        total = max(0.0, total + z - CUSUM_SLACK)
        step = duration - mean if z < CUSUM_MAX_Z else z * sigma
        mean += weight * step
        variance = (1 - weight) * (variance + weight * step * step)
        alarm = total > CUSUM_LIMIT
        if alarm:
            mean = variance = total = 0.0
            seen = 0
        yield alarm


DETECTORS: dict[str, Callable[[Iterable[float]], Iterator[bool]]] = {
    "robust_z": robust_z,
    "ewma_cusum": ewma_cusum,
}


def detected(name: str, steps: list[Step]) -> Iterator[dict[str, object]]:
    seen = steps[WARMUP_STEPS:]
    for step in compress(seen, DETECTORS[name](step.duration_s for step in seen)):
        yield {"time": step.time, "kind": "step_regression", "job": step.job, "rank": None}


def by_chance(
    alarms_a_log: float, steps: list[Step], ranks: list[int]
) -> Iterator[dict[str, object]]:
    """About ``alarms_a_log`` alarms, at random steps, of random kinds and ranks; the same for the
    same log.
    """
    draw = random.Random(zlib.crc32(repr(steps[:5]).encode()))
    for step in steps:
        if draw.random() < alarms_a_log / len(steps):
            kind, rank = draw.choice(JOB_KINDS), draw.choice(ranks)
            yield {"time": step.time, "kind": kind, "job": step.job, "rank": rank}


def main() -> None:
    name, log, *rate = sys.argv[1:]
    records = LogReader().records(read_lines(Path(log)))
    of_all = [record for record in records if isinstance(record, Step)]
    ranks = sorted({step.rank for step in of_all})
    # In synchronous training the steps of all ranks last alike.
    steps = [step for step in of_all if step.rank == ranks[0]]
    is_chance = name == "chance"
    for anomaly in by_chance(float(rate[0]), steps, ranks) if is_chance else detected(name, steps):
        print(json.dumps(anomaly))


if __name__ == "__main__":
    main()
