"""What detection costs: time a step and rank, memory a rank, records a second in a replay.

The stream is a synchronous job whose step times are noisy and whose ranks report phases, memory
and tokens, with a reading of each rank's device every second. All variants see the same records
in turns; figures are medians of the turns. ``no_detectors`` is the engine alone.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from warpwatch_daemon.cli.log_file import LogReader, read_lines
from warpwatch_detection.config import DetectionConfig
from warpwatch_detection.detectors import DETECTORS
from warpwatch_detection.engine import Detection
from warpwatch_detection.replay import Replay
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


def _is_quick() -> bool:
    return bool(os.environ.get("WARPWATCH_BENCH_QUICK"))


def steps(ranks: int, count: int, seed: int = 1) -> Iterator[Step]:
    """``count`` steps of all ranks; the slowest sets the pace, the others wait in comm."""
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
    """``count`` readings of every gauge and counter of a device without labels, one a second."""
    names = [n for n, row in CATALOGUE.items() if n.startswith("device_") and not row.labels]
    for second in range(count):
        for rank in range(ranks):
            metrics: dict[SeriesKey, float] = {(name, ()): float(second % 7) for name in names}
            yield DeviceReading(EPOCH_S + second, f"GPU-{rank}", metrics)


def whole_stream(ranks: int, count: int) -> Iterator[Record]:
    """Steps and device readings in order of time."""
    for rank in range(ranks):
        yield RankSeen(EPOCH_S, JOB, rank, ranks, f"GPU-{rank}")
    readings = device_readings(ranks, 10**9)
    held = next(readings)
    for step in steps(ranks, count):
        while held.time <= step.time:
            yield held
            held = next(readings)
        yield step


def config(*kinds: str) -> DetectionConfig:
    """The defaults, with no other detectors than these."""
    off = {kind: {"enabled": False} for kind in DETECTORS if kind not in kinds}
    return DetectionConfig.model_validate(off)


def feed(settings: DetectionConfig, records: Iterable[Record]) -> Detection:
    engine = Detection(settings)
    for record in records:
        engine.feed(record)
    return engine


def in_turns(variants: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Median seconds of processor time of each, in turns so that all see the same machine."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(turns):
        for name, run in variants.items():
            gc.collect()
            begin = time.process_time()
            run()
            taken[name].append(time.process_time() - begin)
    return {name: statistics.median(times) for name, times in taken.items()}


def measure_feed(ranks: int, count: int, turns: int) -> dict[str, float]:
    records = list(steps(ranks, count))
    variants: dict[str, Callable[[], object]] = {
        "no_detectors_us": lambda: feed(config(), records),
        "all_us": lambda: feed(DetectionConfig(), records),
    }
    taken = in_turns(variants, turns)
    times = {name: seconds / len(records) * 1e6 for name, seconds in taken.items()}
    times["detectors_us"] = times["all_us"] - times["no_detectors_us"]
    return {
        **{name: round(us, 2) for name, us in times.items()},
        "ratio": round(times["all_us"] / times["no_detectors_us"], 2),
    }


def measure_kinds(count: int, turns: int) -> dict[str, float]:
    """µs a step and rank that each detector adds to the engine, alone."""
    records = list(steps(RANKS[0], count))
    variants: dict[str, Callable[[], object]] = {"": lambda: feed(config(), records)}
    for kind in DETECTORS:
        variants[kind] = lambda kind=kind: feed(config(kind), records)  # type: ignore[misc]
    taken = in_turns(variants, turns)
    engine_s = taken.pop("")
    added = {kind: (taken[kind] - engine_s) / len(records) * 1e6 for kind in taken}
    return {kind: round(us, 2) for kind, us in sorted(added.items(), key=lambda item: -item[1])}


def measure_device_readings(count: int, turns: int) -> dict[str, float]:
    """µs for one reading of one device."""
    readings = list(device_readings(RANKS[0], count))
    variants: dict[str, Callable[[], object]] = {
        "no_detectors_us": lambda: feed(config(), readings),
        "all_us": lambda: feed(DetectionConfig(), readings),
    }
    taken = in_turns(variants, turns)
    return {name: round(seconds / len(readings) * 1e6, 2) for name, seconds in taken.items()}


def measure_memory(ranks: int, count: int) -> dict[str, int]:
    """What stays allocated after ``count`` steps; the records themselves come and go."""
    feed(DetectionConfig(), whole_stream(1, 50))
    sizes = {}
    for name, settings in (("no_detectors", config()), ("all", DetectionConfig())):
        gc.collect()
        tracemalloc.start()
        engine = feed(settings, whole_stream(ranks, count))
        gc.collect()
        sizes[f"{name}_bytes_per_rank"] = tracemalloc.get_traced_memory()[0] // ranks
        tracemalloc.stop()
        del engine
    return sizes


def measure_replay(count: int, turns: int) -> dict[str, float]:
    """Records a second of a log on disk: read and decoded only, engine alone, all detectors."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        with log.open("w") as file:
            file.writelines(json.dumps(encode(step)) + "\n" for step in steps(RANKS[0], count))
        variants: dict[str, Callable[[], object]] = {
            "decode": lambda: drain(LogReader().records(read_lines(log))),
            "no_detectors": lambda: drain(
                Replay(config()).run(LogReader().records(read_lines(log)))
            ),
            "all": lambda: drain(Replay().run(LogReader().records(read_lines(log)))),
        }
        taken = in_turns(variants, turns)
    return {f"{name}_per_s": round(RANKS[0] * count / seconds) for name, seconds in taken.items()}


def drain(items: Iterable[object]) -> int:
    return sum(1 for _ in items)


def measure() -> dict[str, object]:
    count, turns = (500, 1) if _is_quick() else (4000, 5)
    fed = {
        f"{ranks}_ranks": measure_feed(ranks, count * RANKS[0] // ranks, turns) for ranks in RANKS
    }
    memory = {f"{ranks}_ranks": measure_memory(ranks, count) for ranks in RANKS}
    replayed = measure_replay(count, turns)
    return {
        "steps": count,
        "feed": fed,
        "by_kind_us": measure_kinds(count // 2, min(turns, 3)),
        "device_reading": measure_device_readings(count // 4, turns),
        "memory": memory,
        "replay": replayed,
        "limits": limits(fed, memory, replayed),
    }


def limits(
    fed: dict[str, dict[str, float]],
    memory: dict[str, dict[str, int]],
    replayed: dict[str, float],
) -> list[dict[str, Any]]:
    """One row a limit, of the worst job; ``ratio``: the value over the limit."""
    us = max(job["all_us"] for job in fed.values())
    size = max(job["all_bytes_per_rank"] for job in memory.values())
    speed = replayed["all_per_s"]
    return [
        _at_most("µs a step and rank, engine and all detectors", us, MAX_US_PER_STEP_AND_RANK),
        _at_most("bytes a rank", size, MAX_BYTES_PER_RANK),
        {
            "what": "records a second in a replay with all detectors",
            "value": speed,
            "at_least": MIN_RECORDS_PER_S,
            "ratio": round(speed / MIN_RECORDS_PER_S, 2),
            "met": speed >= MIN_RECORDS_PER_S,
        },
    ]


def _at_most(what: str, value: float, limit: float) -> dict[str, Any]:
    ratio = round(value / limit, 2)
    return {"what": what, "value": value, "at_most": limit, "ratio": ratio, "met": value <= limit}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
