"""Measures detection: time per step and rank, memory per rank, records per second in a replay.

The stream is a synchronous job with noisy steps, phases, memory and tokens, and a reading of each
rank's device per second. Times are processor time, medians of several turns.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path

from benchmarks.processes import at_least, at_most, is_quick
from warpwatch_daemon.cli.replay import LogReader, read_lines
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


def fed(records: Iterable[Record]) -> Detection:
    engine = Detection()
    for record in records:
        engine.feed(record)
    return engine


def median_s(run: Callable[[], object], turns: int) -> float:
    """Return the median processor seconds of a run."""
    taken = []
    for _ in range(turns):
        gc.collect()
        begin = time.process_time()
        run()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def record_us(records: Sequence[Record], turns: int) -> float:
    """Return the microseconds per record."""
    return round(median_s(lambda: fed(records), turns) / len(records) * 1e6, 2)


def rank_bytes(ranks: int, count: int) -> int:
    """Return the bytes per rank that stay allocated after ``count`` steps."""
    fed(whole_stream(1, 50))
    gc.collect()
    tracemalloc.start()
    engine = fed(whole_stream(ranks, count))
    gc.collect()
    size = tracemalloc.get_traced_memory()[0] // ranks
    tracemalloc.stop()
    del engine
    return size


def replayed_per_s(count: int, turns: int) -> int:
    """Return the records per second from a log on disk."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        with log.open("w") as file:
            file.writelines(json.dumps(encode(step)) + "\n" for step in steps(RANKS[0], count))

        def replay() -> None:
            deque(LogReplay().run(LogReader().records(read_lines(log))), maxlen=0)

        return round(RANKS[0] * count / median_s(replay, turns))


def measure() -> dict[str, object]:
    count, turns = (500, 1) if is_quick() else (4000, 5)
    few, *_ = RANKS
    step_us, memory = {}, {}
    for ranks in RANKS:
        name = f"{ranks}_ranks"
        step_us[name] = record_us(list(steps(ranks, count * few // ranks)), turns)
        memory[name] = rank_bytes(ranks, count)
    replayed = replayed_per_s(count, turns)
    return {
        "steps": count,
        "step_us": step_us,
        "device_reading_us": record_us(list(device_readings(few, count // 4)), turns),
        "bytes_a_rank": memory,
        "replayed_records_per_s": replayed,
        "limits": [
            at_most("µs a step and rank", max(step_us.values()), MAX_US_PER_STEP_AND_RANK),
            at_most("bytes a rank", max(memory.values()), MAX_BYTES_PER_RANK),
            at_least("records a second in a replay", replayed, MIN_RECORDS_PER_S),
        ],
    }
