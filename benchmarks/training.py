"""What the shim costs a real training on the CPU, beside the same loop alone and beside TraceML.

Every variant is a process of its own. In each round all of them live, and take turns of a tenth of
a second, so that all see the same machine; of a turn all but the first steps count, of a round the
turns that were disturbed least. In another round they lie elsewhere in memory, which shifts their
times.
"""

from __future__ import annotations

import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.limits import at_most
from benchmarks.node import LocalDaemon, running_daemon
from benchmarks.processes import CannotMeasure, is_quick, last_line, stop
from warpwatch_daemon.demo.processes import free_port

LOOP = Path(__file__).with_name("training_loop.py")
# Steps of a turn: what is done once for many short steps comes at least once in it.
TURN_STEPS = 300
ROUNDS, TURNS = 12, 16
QUICK_ROUNDS, QUICK_TURNS = 3, 6
RESAMPLES = 2000
TIMEOUT_S = 300.0
STEP_US = 100_000.0
MAX_CALLS_US, MAX_RUN_US = 10.0, 20.0
MAX_SHARE = 0.001
MAX_MEMORY_KIB = 4096.0
INSTALL = "install the extra: pip install -e '.[bench]'"


@dataclass(frozen=True, slots=True)
class Variant:
    """``command`` starts ``loop``; what it adds is counted from ``beside``, the same loop alone."""

    name: str
    command: Callable[[Path], list[str]]
    loop: str
    beside: str = ""


def _python(folder: Path) -> list[str]:
    return [sys.executable]


def _warpwatch_run(folder: Path) -> list[str]:
    return [sys.executable, "-m", "warpwatch", "run", "--", sys.executable]


def _traceml_run(folder: Path) -> list[str]:
    console = Path(sys.executable).with_name("traceml")
    options = ["--mode", "summary", "--logs-dir", str(folder), "--run-name", "run"]
    options += ["--aggregator-port", str(free_port()), "--master-port", str(free_port())]
    return [str(console), "run", *options]


ALONE = (
    Variant("plain", _python, "plain"),
    Variant("plain_compiled", _python, "compiled"),
    Variant("plain_accumulated", _python, "accumulated"),
    Variant("simulated_cuda", _python, "cuda_alone"),
)
CALLS = Variant("calls", _python, "calls", "plain")
RUNS = (
    Variant("run_eager", _warpwatch_run, "plain", "plain"),
    Variant("run_compiled", _warpwatch_run, "compiled", "plain_compiled"),
    Variant("run_accumulated", _warpwatch_run, "accumulated", "plain_accumulated"),
    Variant("run_simulated_cuda", _warpwatch_run, "cuda", "simulated_cuda"),
)
PEERS = (
    Variant("traceml_run", _traceml_run, "plain", "plain"),
    Variant("traceml_code", _traceml_run, "traceml", "plain"),
)
VARIANTS = (*ALONE, CALLS, *RUNS, *PEERS)


@dataclass(slots=True)
class Round:
    """What a variant did in a round; ``failure`` says why it did nothing."""

    failure: str = ""
    turns: list[dict[str, float]] = field(default_factory=list)
    seen: int | None = None

    def undisturbed(self, figure: str) -> float:
        """The lower quartile of the turns: neighbours only ever make one longer."""
        return statistics.quantiles((turn[figure] for turn in self.turns), n=4)[0]


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
            try:
                self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            except OSError as error:
                raise CannotMeasure(f"{command[0]}: {error.strerror}; {INSTALL}") from error
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
        said = last_line(self._log.read_text(errors="replace"))
        return CannotMeasure(f"{self._variant.name} ended: {said}")


def measure() -> dict[str, Any]:
    """Raises CannotMeasure when nothing can be compared: not even the loop alone runs."""
    rounds, turns = (QUICK_ROUNDS, QUICK_TURNS) if is_quick() else (ROUNDS, TURNS)
    taken = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            taken.append(run(Path(name), turns))
    report = {variant.name: summary(variant, taken) for variant in VARIANTS}
    about = {"rounds": rounds, "turns": turns, "turn_steps": TURN_STEPS}
    return {**about, "variants": report, "limits": judge(report)}


def run(folder: Path, turns: int) -> dict[str, Round]:
    """One round: of each variant, the answers of its turns and the steps that its observer saw."""
    rounds = {variant.name: Round() for variant in VARIANTS}
    with running_daemon(sources={"nvml": {"enabled": False}}) as daemon:
        workers: dict[Variant, Worker] = {}
        for variant in VARIANTS:
            try:
                workers[variant] = _worker(variant, folder, daemon.training_environment)
            except CannotMeasure as reason:
                rounds[variant.name].failure = str(reason)
        for turn in range(turns):
            # In another order each time: what ran before leaves its mark on the caches.
            for variant in random.Random(turn).sample([*workers], len(workers)):
                rounds[variant.name].turns.append(workers[variant].run(TURN_STEPS))
        for variant, worker in workers.items():
            worker.finish()
            rounds[variant.name].seen = _steps_seen(variant, folder, daemon)
    return rounds


def _worker(variant: Variant, folder: Path, environment: dict[str, str]) -> Worker:
    own = folder / variant.name
    own.mkdir()
    return Worker(variant, own, {**environment, "WARPWATCH_JOB": variant.name})


def _steps_seen(variant: Variant, folder: Path, daemon: LocalDaemon) -> int | None:
    if variant in PEERS:
        path = folder / variant.name / "run" / "final_summary.json"
        summary = json.loads(path.read_text(encoding="utf-8"))
        return int(summary["step_time"]["metadata"]["training_total_steps"] or 0)
    return next((int(rank["steps_total"]) for rank in daemon.ranks(variant.name)), None)


def summary(variant: Variant, rounds: list[dict[str, Round]]) -> dict[str, Any]:
    """Medians over the rounds, and what it adds to the loop alone, with 95 % bounds."""
    own = [one[variant.name] for one in rounds]
    alone = [one[variant.beside or variant.name] for one in rounds]
    failure = next((one.failure for one in (*own, *alone) if one.failure), "")
    if failure:
        return {"not_measured": failure}
    row: dict[str, Any] = {}
    for figure in ("step_us", "cpu_us", "rss_kib"):
        row[figure] = round(statistics.median(one.undisturbed(figure) for one in own), 1)
        if variant.beside:
            pairs = zip(own, alone, strict=True)
            added = [one.undisturbed(figure) - by.undisturbed(figure) for one, by in pairs]
            low, high = bounds(added)
            row[f"added_{figure}"] = round(statistics.median(added), 1)
            row[f"added_{figure}_95"] = [round(low, 1), round(high, 1)]
    if variant.beside:
        row["steps_seen"] = own[-1].seen
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
    for variant in (CALLS, *RUNS):
        figures = report[variant.name]
        if "not_measured" in figures:
            continue
        limit_us = MAX_CALLS_US if variant is CALLS else MAX_RUN_US
        added_us, name = figures["added_step_us"], variant.name
        rows += [
            at_most(f"{name}: µs added to a step", added_us, limit_us),
            at_most(f"{name}: share of a 100 ms step", added_us / STEP_US, MAX_SHARE),
            at_most(f"{name}: KiB a rank", figures["added_rss_kib"], MAX_MEMORY_KIB),
        ]
    return rows
