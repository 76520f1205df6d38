"""What a capture costs the training: the seconds by which steps were late, per 100,000 events.

Two ways to the same trace: the shim with ``trace_only``, and without it (as on PyTorch before
2.13).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.node import running_daemon
from benchmarks.processes import CannotMeasure, is_quick, wait_until
from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.cli.capture import wait
from warpwatch_telemetry.errors import WarpwatchError

LOOP = Path(__file__).with_name("paused_loop.py")
JOB = "paused"
# Operators a step: forward and backward make about five events of each.
OPERATORS, QUICK_OPERATORS = 2000, 200
STEPS = 5
ROUNDS, QUICK_ROUNDS = 5, 1
BASELINE_S = 3.0
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    arguments: tuple[str, ...] = ()


WAYS = (
    Way("shim"),
    Way("shim_without_trace_only", ("whole",)),
)


def measure() -> dict[str, Any]:
    """Raises CannotMeasure when a capture brings nothing."""
    rounds, operators = (QUICK_ROUNDS, QUICK_OPERATORS) if is_quick() else (ROUNDS, OPERATORS)
    runs: dict[str, list[dict[str, float]]] = {way.name: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        for turn in range(rounds):
            for way in WAYS:
                folder = Path(name) / f"{turn}-{way.name}"
                folder.mkdir()
                runs[way.name].append(run(way, folder, operators))
    medians = {
        way: {key: round(statistics.median(one[key] for one in of), 4) for key in of[0]}
        for way, of in runs.items()
    }
    return {"rounds": rounds, "steps": STEPS, "ways": medians}


def run(way: Way, folder: Path, operators: int) -> dict[str, float]:
    stop, result = folder / "stop", folder / "result.json"
    sections = {"sources": {"nvml": {"enabled": False}}}
    with running_daemon(**sections) as daemon:
        launcher = ["-m", "warpwatch", "run", "--job", JOB, "--"]
        loop = [str(LOOP), str(operators), str(stop), str(result), *way.arguments]
        with subprocess.Popen(
            [sys.executable, *launcher, sys.executable, *loop], env=daemon.training_environment
        ) as process:
            try:
                asked_s, capture = _captured(daemon.api, way)
            finally:
                stop.touch()
                process.wait(TIMEOUT_S)
    ended_s = json.loads(result.read_text(encoding="utf-8"))
    until_s = capture["end_time"] or time.time()
    (rank,) = capture["ranks"]
    return cost(ended_s, asked_s, until_s, rank["events"])


def _captured(api: ApiClient, way: Way) -> tuple[float, Any]:
    """When it was asked for, and the capture once it is there."""
    body = {"job": JOB, "kind": "torch", "steps": STEPS}
    asked: dict[str, Any] = {}

    def ask() -> bool:
        time.sleep(BASELINE_S)
        asked.update(at=time.time(), **api.post("/api/v1/captures", body))
        return True

    wait_until(ask)
    try:
        capture = wait(api, asked["id"], TIMEOUT_S)
    except WarpwatchError as error:
        raise CannotMeasure(f"{way.name}: {error}") from error
    if capture["outcome"] != "complete":
        raise CannotMeasure(f"{way.name}: {capture['outcome']}: {capture['detail']}")
    time.sleep(BASELINE_S / 3)
    return asked["at"], capture


def cost(ended_s: list[float], asked_s: float, until_s: float, events: int) -> dict[str, float]:
    """Steps that end between request and hand-over, against the median step before."""
    steps = [(end, end - begin) for begin, end in pairwise(ended_s)]
    before_s = statistics.median(took for end, took in steps if end < asked_s)
    during = [took for end, took in steps if asked_s <= end <= until_s]
    late_s = sum(took - before_s for took in during)
    return {
        "step_s": before_s,
        "longest_step_s": max(during),
        "late_s": late_s,
        "events": float(events),
        "late_s_per_100000_events": 1e5 * late_s / events,
    }
