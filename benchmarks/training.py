"""What the shim costs a real training on the CPU, beside the same loop alone and beside TraceML.

Every variant is a process of its own. In each round all of them live, and take turns of a tenth of
a second, so that all see the same machine; what a variant adds is taken within a turn, of which all
but the first steps count. In another round they lie elsewhere in memory, which shifts their times.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from benchmarks.processes import CannotMeasure, clean_environment, start, stop, wait_until
from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.demo.processes import free_port

LOOP = Path(__file__).with_name("training_loop.py")
# Steps of a turn: what is done once for many short steps comes at least once in it.
TURN_STEPS = 300
ROUNDS, TURNS = 12, 24
QUICK_ROUNDS, QUICK_TURNS = 3, 6
RESAMPLES = 2000
TIMEOUT_S = 300.0
STEP_US = 100_000.0
# On a machine where TraceML added 88 µs to a step; how fast the one at hand is now, TraceML tells.
MAX_ADDED_US, TRACEML_ADDED_US = 10.0, 88.0
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
    return [sys.executable, "-m", "warpwatch", "run", "--", sys.executable]


def _traceml_run(folder: Path) -> list[str]:
    console = Path(sys.executable).with_name("traceml")
    options = ["--mode", "summary", "--logs-dir", str(folder), "--run-name", "run"]
    options += ["--aggregator-port", str(free_port()), "--master-port", str(free_port())]
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


class Worker:
    """A variant's process, which trains when it is asked to."""

    def __init__(self, variant: Variant, folder: Path, environment: dict[str, str]) -> None:
        self._variant, self._folder = variant, folder
        path, self._log = folder / "socket", folder / "output"
        arguments = [variant.loop, str(path)]
        if variant.command is _traceml_run:
            arguments = ["--args", *arguments]
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
            listener.bind(str(path))
            listener.listen()
            command = [*variant.command(folder), str(LOOP), *arguments]
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            self._connection = self._accepted(listener)
        self._lines = self._connection.makefile("rw", encoding="ascii")
        # The steps of the warm-up.
        self._answer()

    def run(self, steps: int) -> dict[str, float]:
        print(steps, file=self._lines, flush=True)
        return self._answer()

    def finish(self) -> None:
        self._lines.close()
        self._connection.close()
        self._process.wait(TIMEOUT_S)
        # The daemon reads the end of the ring.
        time.sleep(1)

    def _accepted(self, listener: socket.socket) -> socket.socket:
        listener.settimeout(0.2)
        deadline = time.monotonic() + TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with suppress(TimeoutError):
                return listener.accept()[0]
        stop(self._process)
        raise self._failure()

    def _answer(self) -> dict[str, float]:
        line = self._lines.readline()
        if not line:
            self._process.wait(TIMEOUT_S)
            raise self._failure()
        answer: dict[str, float] = json.loads(line)
        return answer

    def _failure(self) -> CannotMeasure:
        said = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        return CannotMeasure(f"{self._variant.name} ended: {said[-1]}")


def measure() -> dict[str, Any]:
    """Raises CannotMeasure when the peer is not installed or a loop fails."""
    try:
        version = metadata.version("traceml-ai")
    except metadata.PackageNotFoundError as error:
        raise CannotMeasure(f"traceml-ai is not installed; {INSTALL}") from error
    quick = bool(os.environ.get("WARPWATCH_BENCH_QUICK"))
    rounds, turns = (QUICK_ROUNDS, QUICK_TURNS) if quick else (ROUNDS, TURNS)
    taken = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            taken.append(run(Path(name), turns))
    report = {variant.name: summary(variant.name, taken) for variant in VARIANTS}
    about = {"rounds": rounds, "turns": turns, "turn_steps": TURN_STEPS, "traceml": version}
    return {**about, "variants": report, "limits": judge(report)}


def run(folder: Path, turns: int) -> dict[str, dict[str, Any]]:
    """One round: of each variant, the answers of its turns and the steps that its observer saw."""
    answers: dict[str, list[dict[str, float]]] = {variant.name: [] for variant in VARIANTS}
    seen: dict[str, int | None] = {}
    with ExitStack() as stack:
        workers: dict[Variant, tuple[Worker, ApiClient]] = {}
        for variant in VARIANTS:
            own = folder / variant.name
            own.mkdir()
            environment, api = stack.enter_context(daemon(own))
            workers[variant] = Worker(variant, own, environment), api
        for turn in range(turns):
            # Each comes after each other one in its time.
            for place in range(len(VARIANTS)):
                variant = VARIANTS[(turn + place * (1 + turn % 4)) % len(VARIANTS)]
                answers[variant.name].append(workers[variant][0].run(TURN_STEPS))
        for variant, (worker, api) in workers.items():
            worker.finish()
            seen[variant.name] = variant.seen(folder / variant.name, api)
    return {name: {"turns": answers[name], "seen": seen[name]} for name in answers}


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
    arguments = ["-m", "warpwatch_daemon", "daemon", "--config", str(config)]
    process = start(arguments, clean_environment(), folder / "daemon.log")
    api = ApiClient(f"http://127.0.0.1:{port}")
    try:
        wait_until(lambda: api.get("/api/v1/ranks"))
        names = {"WARPWATCH_DIR": "rendezvous", "WARPWATCH_INBOX": "inbox"}
        places = {key: str(folder / value) for key, value in names.items()}
        yield {**clean_environment(), **places}, api
    finally:
        stop(process)


def summary(name: str, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the rounds, and what the variant adds to the plain loop, with 95 % bounds."""
    row: dict[str, Any] = {}
    for figure in ("step_us", "cpu_us", "rss_kib"):
        row[figure] = round(_middle(middle_of(one[name], figure) for one in rounds), 1)
        if name != "plain":
            added = [_middle(added_by(one, name, figure)) for one in rounds]
            low, high = bounds(added)
            row[f"added_{figure}"] = round(statistics.median(added), 1)
            row[f"added_{figure}_95"] = [round(low, 1), round(high, 1)]
    if name != "plain":
        row["steps_seen"] = rounds[-1][name]["seen"]
    return row


def middle_of(variant: dict[str, Any], figure: str) -> float:
    return _middle(turn[figure] for turn in variant["turns"])


def added_by(one: dict[str, dict[str, Any]], name: str, figure: str) -> Iterator[float]:
    """Of each turn of the round."""
    for turn, alone in zip(one[name]["turns"], one["plain"]["turns"], strict=True):
        yield turn[figure] - alone[figure]


def _middle(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def bounds(values: list[float]) -> tuple[float, float]:
    """95 % percentile bootstrap of the median (Efron 1979)."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def judge(report: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    peer_us = report["traceml_code"]["added_step_us"]
    for name in ("warpwatch_run", "warpwatch_code"):
        added_us = report[name]["added_step_us"]
        share = MAX_ADDED_US / TRACEML_ADDED_US
        rows += [
            _at_most(f"{name}: µs added to a step", added_us, MAX_ADDED_US),
            _at_most(f"{name}: share of what TraceML adds", added_us / peer_us, round(share, 4)),
            _at_most(f"{name}: share of a 100 ms step", added_us / STEP_US, MAX_SHARE),
            _at_most(f"{name}: KiB a rank", report[name]["added_rss_kib"], MAX_MEMORY_KIB),
        ]
    return rows


def _at_most(what: str, value: float, limit: float) -> dict[str, Any]:
    return {"what": what, "value": round(value, 6), "at_most": limit, "met": value <= limit}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
