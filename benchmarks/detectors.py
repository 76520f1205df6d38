"""Measures detection: time per step and rank, memory per rank, records per second in a replay.

The stream is a synchronous job with noisy steps, phases, memory and tokens, and a reading of each
rank's device per second. All variants get the same records in turns; figures are medians.
``no_detectors`` is the engine alone.
"""

from __future__ import annotations

import gc
import heapq
import json
import random
import statistics
import tempfile
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from benchmarks.processes import at_least, at_most, is_quick
from warpwatch_daemon.cli.replay import LogReader, read_lines
from warpwatch_detection.config import DetectionConfig
from warpwatch_detection.detectors import DETECTORS
from warpwatch_detection.engine import Detection
from warpwatch_detection.replay import LogReplay
from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.log import encode
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import DeviceReading, RankSeen, Record, Step

EPOCH_S = 1_700_000_000.0
STEP_S = 0.5
RANKS = (8, 64)
JOB = "benchmark"

MAX_US_PER_STEP_AND_RANK = 50.0
MAX_BYTES_PER_RANK = 200_000
MIN_RECORDS_PER_S = 60_000

NO_DETECTORS = DetectionConfig(disabled=tuple(DETECTORS))

Figures = dict[str, float]


def steps(ranks: int, count: int, seed: int = 1) -> Iterator[Step]:
    """Yield ``count`` steps of all ranks; the slowest sets the pace, the others wait in comm."""
    noise, now = random.Random(seed), EPOCH_S
    for number in range(count):
        common = STEP_S * noise.lognormvariate(0.0, 0.01)
        work = [0.8 * common * noise.lognormvariate(0.0, 0.005) for _ in range(ranks)]
        wait = [0.005 * common * noise.lognormvariate(0.0, 0.5) for _ in range(ranks)]
        local = max(map(sum, zip(work, wait, strict=True)))
        duration = round(local + 0.2 * common, 6)
        now = round(now + duration, 6)
        for rank in range(ranks):
            phases = {
                "data_wait": round(wait[rank], 6),
                "comm": round(duration - work[rank] - wait[rank], 6),
            }
            memory = 40_000_000_000 + noise.randrange(10_000_000)
            yield Step(now, JOB, rank, number, duration, None, phases, memory, 8, 65536)


def device_readings(ranks: int, count: int) -> Iterator[DeviceReading]:
    """Yield ``count`` readings per device, one per second, with all metrics without labels."""
    names = [n for n, row in CATALOGUE.items() if n.startswith("device_") and not row.labels]
    for second in range(count):
        for rank in range(ranks):
            metrics: dict[SeriesKey, float] = {(name, ()): float(second % 7) for name in names}
            yield DeviceReading(EPOCH_S + second, f"GPU-{rank}", metrics)


def whole_stream(ranks: int, count: int) -> Iterator[Record]:
    """Yield steps and device readings in order of time."""
    for rank in range(ranks):
        yield RankSeen(EPOCH_S, JOB, rank, ranks, f"GPU-{rank}")
    readings: Iterator[Record] = device_readings(ranks, int(count * STEP_S))
    yield from heapq.merge(readings, steps(ranks, count), key=attrgetter("time"))


def feed(settings: DetectionConfig, records: Iterable[Record]) -> Detection:
    engine = Detection(settings)
    for record in records:
        engine.feed(record)
    return engine


def in_turns(variants: Mapping[str, Callable[[], object]], turns: int) -> Figures:
    """Return the median processor seconds of each variant; in turns, on the same machine."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(turns):
        for name, run in variants.items():
            gc.collect()
            begin = time.process_time()
            run()
            taken[name].append(time.process_time() - begin)
    return {name: statistics.median(times) for name, times in taken.items()}


def measure_feed(records: list[Any], turns: int) -> Figures:
    """Return µs per record: engine alone, and with all detectors."""
    settings = {"no_detectors": NO_DETECTORS, "all": DetectionConfig()}
    variants = {name: partial(feed, of, records) for name, of in settings.items()}
    taken = in_turns(variants, turns)
    return {name: round(seconds / len(records) * 1e6, 2) for name, seconds in taken.items()}


def measure_memory(ranks: int, count: int) -> dict[str, int]:
    """Return the bytes per rank that stay allocated after ``count`` steps."""
    feed(DetectionConfig(), whole_stream(1, 50))
    sizes = {}
    for name, settings in (("no_detectors", NO_DETECTORS), ("all", DetectionConfig())):
        gc.collect()
        tracemalloc.start()
        engine = feed(settings, whole_stream(ranks, count))
        gc.collect()
        sizes[name] = tracemalloc.get_traced_memory()[0] // ranks
        tracemalloc.stop()
        del engine
    return sizes


def measure_replay(count: int, turns: int) -> Figures:
    """Return the records per second from a log: decoded only, engine alone, all detectors."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        with log.open("w") as file:
            file.writelines(json.dumps(encode(step)) + "\n" for step in steps(RANKS[0], count))

        def records() -> Iterator[Record]:
            return LogReader().records(read_lines(log))

        variants = {
            "decode": lambda: deque(records(), maxlen=0),
            "no_detectors": lambda: deque(LogReplay(NO_DETECTORS).run(records()), maxlen=0),
            "all": lambda: deque(LogReplay().run(records()), maxlen=0),
        }
        taken = in_turns(variants, turns)
    return {name: round(RANKS[0] * count / seconds) for name, seconds in taken.items()}


def measure() -> dict[str, object]:
    count, turns = (500, 1) if is_quick() else (4000, 5)
    few, *_ = RANKS
    fed = {
        f"{ranks}_ranks": measure_feed(list(steps(ranks, count * few // ranks)), turns)
        for ranks in RANKS
    }
    memory = {f"{ranks}_ranks": measure_memory(ranks, count) for ranks in RANKS}
    replayed = measure_replay(count, turns)
    step_us, rank_bytes = (max(of["all"] for of in one.values()) for one in (fed, memory))
    return {
        "steps": count,
        "step_us": fed,
        "device_reading_us": measure_feed(list(device_readings(few, count // 4)), turns),
        "bytes_a_rank": memory,
        "replayed_records_per_s": replayed,
        "limits": [
            at_most("µs a step and rank", step_us, MAX_US_PER_STEP_AND_RANK),
            at_most("bytes a rank", rank_bytes, MAX_BYTES_PER_RANK),
            at_least("records a second in a replay", replayed["all"], MIN_RECORDS_PER_S),
        ],
    }
