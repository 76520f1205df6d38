"""Measures how long a capture takes, and how long it delays the training.

    python -m benchmarks.capture OPERATORS STOP RESULT

is the training: steps of many small operators until the file STOP appears. It writes the wall clock
at the end of each step, in seconds, as JSON into the file RESULT.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.processes import CannotMeasure, at_most, is_quick, running_daemon, wait_until
from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.cli.capture import wait
from warpwatch_daemon.demo.processes import JOB, RANKS, DemoProcesses
from warpwatch_daemon.demo.story import Story

CAPTURES = 5
STEPS = 5
TIMEOUT_S = 120.0
# Limits from request to recording: the shim's poll of its command file, then steps to the start.
MAX_POLL_S, MAX_STEPS = 0.2, 4.0

PAUSED_JOB = "paused"
# Forward and backward make about five events of each operator.
OPERATORS, QUICK_OPERATORS = 2000, 200
ROUNDS, QUICK_ROUNDS = 5, 1
BASELINE_S = 3.0
# The training checks the stop file only this often: the check is a system call.
STOP_EVERY_STEPS = 20


def measure() -> dict[str, Any]:
    """Measure the time from a request to the recording, the files and the diagnosis: two ranks."""
    with DemoProcesses("127.0.0.1:0", None) as processes:
        processes.start_daemon()
        processes.start_training()
        Story(processes, lambda text: None).wait_for_steps()
        runs = [_delays(processes) for _ in range(CAPTURES)]
    figures = _medians(runs)
    beyond = max(0.0, (figures["request_to_recording_s"] - MAX_POLL_S) / figures["step_s"])
    return {
        "captures": CAPTURES,
        "ranks": RANKS,
        "steps": STEPS,
        **figures,
        "limits": [at_most("steps to the recording beyond 0.2 s", round(beyond, 2), MAX_STEPS)],
    }


def _delays(processes: DemoProcesses) -> dict[str, float]:
    requested, capture = _captured(processes.api, JOB)
    ranks = processes.api.get("/api/v1/ranks")["ranks"]
    return {
        "step_s": statistics.median(s for rank in ranks for s in rank["recent_s"]),
        "request_to_recording_s": capture["recording_time"] - requested,
        "request_to_files_s": capture["end_time"] - requested,
        "request_to_diagnosis_s": time.time() - requested,
    }


def measure_pause() -> dict[str, Any]:
    """Measure how long a capture delays the steps, per 100,000 events. Raises CannotMeasure."""
    rounds, operators = (QUICK_ROUNDS, QUICK_OPERATORS) if is_quick() else (ROUNDS, OPERATORS)
    with tempfile.TemporaryDirectory() as folder:
        runs = [_pause(Path(folder) / f"{turn}", operators) for turn in range(rounds)]
    return {"rounds": rounds, "steps": STEPS, **_medians(runs)}


def _pause(folder: Path, operators: int) -> dict[str, float]:
    folder.mkdir()
    stop, result = folder / "stop", folder / "result.json"
    with running_daemon(sources={"nvml": {"enabled": False}}) as daemon:
        launcher = ["-m", "warpwatch", "run", "--job", PAUSED_JOB, "--", sys.executable]
        loop = ["-m", "benchmarks.capture", str(operators), str(stop), str(result)]
        command = [sys.executable, *launcher, *loop]
        with subprocess.Popen(command, env=daemon.training_environment) as process:
            try:
                wait_until(lambda: daemon.ranks(PAUSED_JOB))
                time.sleep(BASELINE_S)
                requested, capture = _captured(daemon.api, PAUSED_JOB)
                time.sleep(BASELINE_S / 3)
            finally:
                stop.touch()
                process.wait(TIMEOUT_S)
    ended_s = json.loads(result.read_text(encoding="utf-8"))
    (rank,) = capture["ranks"]
    return _cost(ended_s, requested, capture["end_time"] or time.time(), rank["events"])


def _cost(ended_s: list[float], requested: float, until: float, events: int) -> dict[str, float]:
    """Compare the steps between request and hand-over with the median step before."""
    steps = [(end, end - begin) for begin, end in pairwise(ended_s)]
    before_s = statistics.median(took for end, took in steps if end < requested)
    during = [took for end, took in steps if requested <= end <= until]
    late_s = sum(took - before_s for took in during)
    return {
        "step_s": before_s,
        "longest_step_s": max(during),
        "late_s": late_s,
        "events": float(events),
        "late_s_per_100000_events": 1e5 * late_s / events,
    }


def _captured(api: ApiClient, job: str) -> tuple[float, dict[str, Any]]:
    requested = time.time()
    body = {"job": job, "kind": "torch", "steps": STEPS}
    capture: dict[str, Any] = wait(api, api.post("/api/v1/captures", body)["id"], TIMEOUT_S)
    if capture["outcome"] != "complete":
        raise CannotMeasure(f"capture {capture['id']}: {capture['outcome']}: {capture['detail']}")
    return requested, capture


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}


def _train(operators: int, stop: Path) -> list[float]:
    import torch

    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    ended_s: list[float] = []
    while len(ended_s) % STOP_EVERY_STEPS or not stop.exists():
        value = weight
        for _ in range(operators):
            value = value * 1.0001
        optimizer.zero_grad()
        value.sum().backward()
        optimizer.step()
        ended_s.append(time.time())
    return ended_s


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(_train(int(sys.argv[1]), Path(sys.argv[2]))))
