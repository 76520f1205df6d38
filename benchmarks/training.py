"""What the shim costs a real training on the CPU, beside the same loop alone and beside TraceML.

Every variant is a process of its own, one after the other in rounds, so that all see the same
machine; what a variant adds is taken within a round. A daemon runs all the time.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from benchmarks.processes import CannotMeasure, clean_environment, start, stop, wait_until
from warpwatch.daemon.api_client import ApiClient
from warpwatch.daemon.demo.processes import free_port

LOOP = Path(__file__).with_name("training_loop.py")
ROUNDS, STEPS = 9, 4000
QUICK_ROUNDS, QUICK_STEPS = 3, 1500
RESAMPLES = 2000
TIMEOUT_S = 300.0
STEP_US = 100_000.0
MAX_ADDED_US = 10.0
MAX_SHARE = 0.001
MAX_MEMORY_KIB = 4096.0
INSTALL = "install the extra: pip install -e '.[bench]'"


@dataclass(frozen=True, slots=True)
class Variant:
    """``command`` starts the loop; ``seen`` tells how many steps the observer has seen of it."""

    name: str
    command: Callable[[Path], list[str]]
    loop: str = "plain"
    seen: Callable[[Path, ApiClient], int | None] = lambda folder, api: None


def _python(folder: Path) -> list[str]:
    return [sys.executable]


def _warpwatch_run(folder: Path) -> list[str]:
    return [sys.executable, "-m", "warpwatch.client", "run", "--", sys.executable]


def _traceml_run(folder: Path) -> list[str]:
    console = Path(sys.executable).with_name("traceml")
    options = ["--mode", "summary", "--logs-dir", str(folder), "--run-name", "run"]
    return [str(console), "run", *options]


def _steps_of_daemon(folder: Path, api: ApiClient) -> int:
    return max((int(rank["steps_total"]) for rank in api.get("/api/v1/ranks")["ranks"]), default=0)


def _steps_of_traceml(folder: Path, api: ApiClient) -> int:
    summary = json.loads((folder / "run" / "final_summary.json").read_text(encoding="utf-8"))
    return int(summary["step_time"]["metadata"]["training_total_steps"] or 0)


VARIANTS = (
    Variant("plain", _python),
    Variant("warpwatch_run", _warpwatch_run, "plain", _steps_of_daemon),
    Variant("warpwatch_code", _python, "shim", _steps_of_daemon),
    Variant("traceml_run", _traceml_run, "plain", _steps_of_traceml),
    Variant("traceml_code", _traceml_run, "traceml", _steps_of_traceml),
)


def measure() -> dict[str, Any]:
    """Raises CannotMeasure when the peer is not installed or a loop fails."""
    try:
        version = metadata.version("traceml-ai")
    except metadata.PackageNotFoundError as error:
        raise CannotMeasure(f"traceml-ai is not installed; {INSTALL}") from error
    quick = bool(os.environ.get("WARPWATCH_BENCH_QUICK"))
    rounds, steps = (QUICK_ROUNDS, QUICK_STEPS) if quick else (ROUNDS, STEPS)
    results: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as name:
        for turn in range(rounds):
            for variant in VARIANTS:
                folder = Path(name) / f"{turn}-{variant.name}"
                results[variant.name].append(run(variant, folder, steps))
    report = {variant: summary(runs, results["plain"]) for variant, runs in results.items()}
    about = {"rounds": rounds, "steps": steps, "traceml": version}
    return {**about, "variants": report, "limits": judge(report)}


def run(variant: Variant, folder: Path, steps: int) -> dict[str, Any]:
    """One process in a folder of its own, with a daemon of its own."""
    folder.mkdir()
    result = folder / "result.json"
    with daemon(folder) as (environment, api):
        command = [*variant.command(folder), str(LOOP)]
        arguments = [variant.loop, str(steps), str(result)]
        if variant.command is _traceml_run:
            arguments = ["--args", *arguments]
        done = subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, timeout=TIMEOUT_S
        )
        if not result.is_file():
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no result"]
            raise CannotMeasure(f"{variant.name} ended with {done.returncode}: {lines[-1]}")
        # The daemon reads the end of the ring.
        time.sleep(1)
        measured = json.loads(result.read_text(encoding="utf-8"))
        return {**measured, "steps_seen": variant.seen(folder, api)}


@contextmanager
def daemon(folder: Path) -> Iterator[tuple[dict[str, str], ApiClient]]:
    """A daemon without devices, and the environment of a training beside it."""
    port = free_port()
    config = folder / "warpwatch.yaml"
    tree = {
        "http": {"listen": f"127.0.0.1:{port}"},
        "rendezvous": {"dir": str(folder / "rendezvous"), "inbox": str(folder / "inbox")},
        "sources": {"nvml": {"enabled": False}},
        "store": {"url": (folder / "captures").as_uri()},
    }
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    arguments = ["-m", "warpwatch.daemon", "daemon", "--config", str(config)]
    process = start(arguments, clean_environment(), folder / "daemon.log")
    api = ApiClient(f"http://127.0.0.1:{port}")
    try:
        wait_until(lambda: api.get("/api/v1/ranks"))
        names = {"WARPWATCH_DIR": "rendezvous", "WARPWATCH_INBOX": "inbox"}
        places = {key: str(folder / value) for key, value in names.items()}
        yield {**clean_environment(), **places}, api
    finally:
        stop(process)


def summary(runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and what the variant adds to the plain loop of the same round, with 95 % bounds."""
    names = ("step_us", "cpu_us", "rss_kib")
    row: dict[str, Any] = {
        name: round(statistics.median(one[name] for one in runs), 1) for name in names
    }
    if runs is not plain:
        for name in names:
            added = [one[name] - alone[name] for one, alone in zip(runs, plain, strict=True)]
            low, high = bounds(added)
            key = f"added_{name}"
            row[key] = round(statistics.median(added), 1)
            row[f"{key}_95"] = [round(low, 1), round(high, 1)]
        row["steps_seen"] = runs[-1]["steps_seen"]
    return row


def bounds(values: list[float]) -> tuple[float, float]:
    """95 % percentile bootstrap of the median (Efron 1979)."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def judge(report: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for name in ("warpwatch_run", "warpwatch_code"):
        added_us = report[name]["added_step_us"]
        rows += [
            _at_most(f"{name}: µs added to a step", added_us, MAX_ADDED_US),
            _at_most(f"{name}: share of a 100 ms step", added_us / STEP_US, MAX_SHARE),
            _at_most(f"{name}: KiB a rank", report[name]["added_rss_kib"], MAX_MEMORY_KIB),
        ]
    return rows


def _at_most(what: str, value: float, limit: float) -> dict[str, Any]:
    return {"what": what, "value": round(value, 6), "at_most": limit, "met": value <= limit}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
