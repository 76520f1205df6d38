"""Checks what the shim costs a training on the GPU, and whether its step times are true."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import CannotCheck, Report
from benchmarks.processes import LocalDaemon, output_of, running_daemon

# The steps of a turn by network and mode.
TRAINED = {
    ("perceptron", "eager"): 200,
    ("transformer", "eager"): 10,
    ("transformer", "compile"): 10,
    ("transformer", "graph"): 10,
}
TURNS, QUICK_TURNS, QUICK_STEPS = 15, 3, 3
TIMEOUT_S = 100.0
# The larger limit counts: a short step is bound by launches, as the shim is.
MAX_ADDED_US, MAX_ADDED_RATIO = 20.0, 0.003
# The largest deviation of the steps' own times from those of the turns.
MAX_ERROR_RATIO = 0.05
# After this time the daemon has read and logged the last steps.
LOGGED_S = 2.0


def check_shim(report: Report) -> None:
    setting = report.setting
    for (network, mode), steps in TRAINED.items():
        with report.part(f"{network}_{mode}") as figures:
            setting.need_torch()
            if mode == "graph" and setting.device != "cuda":
                raise CannotCheck("there are no CUDA graphs on the CPU")
            turns, steps = (QUICK_TURNS, QUICK_STEPS) if setting.quick else (TURNS, steps)
            log = Path(tempfile.mkdtemp()) / "log.jsonl"
            with running_daemon(exporters={"jsonl": {"path": str(log)}}) as daemon:
                figures |= train(daemon, network, mode, setting.device, str(turns), str(steps))
                time.sleep(LOGGED_S)
            figures["true_times"] = true_times(figures.pop("shim_turns"), log)
            state(report, f"{network} {mode}", figures)


def train(daemon: LocalDaemon, *arguments: str) -> Any:
    """Return the output of the training's turns. Raises CannotMeasure."""
    command = ["-m", "benchmarks.gpu.training", "turns", *arguments]
    return output_of("the training", command, daemon.training_environment, TIMEOUT_S)


def true_times(turns: list[dict[str, Any]], log: Path) -> dict[str, float]:
    """Return the steps' mean times in our log over those of the turns: medians over the turns.

    The first step of a turn is ignored: it includes the other loop's turn.
    """
    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps = {record["step"]: record for record in records if record["type"] == "step"}
    ratios: dict[str, list[float]] = {}
    for turn in turns:
        numbers = range(turn["first_step"] + 1, turn["first_step"] + turn["steps"])
        for what in ("duration_s", "gpu_s"):
            known = [steps[n][what] for n in numbers if steps.get(n, {}).get(what) is not None]
            if known:
                ratio = statistics.fmean(known) * 1e6 / turn["step_us"]
                ratios.setdefault(what, []).append(ratio)
    return {what: round(statistics.median(values), 4) for what, values in ratios.items()}


def state(report: Report, name: str, figures: dict[str, Any]) -> None:
    limit_us = max(MAX_ADDED_US, MAX_ADDED_RATIO * figures["step_us"])
    low, high = figures["added_us_95"]
    text = f"{name}, {figures['step_us']:.0f} µs a step: the shim adds {figures['added_us']:.1f} µs"
    text += f" ({low:.1f} to {high:.1f}; at most {limit_us:.0f})"
    report.expect(low <= limit_us, text, timed=True)
    if "waiting_calls" in figures:
        alone, watched = figures["waiting_calls"]
        text = f"{name}: calls that wait for the GPU: {alone} without, {watched} with the shim"
        report.expect(watched <= alone, text)
    ratio = figures["true_times"].get("duration_s")
    true = ratio is not None and abs(ratio - 1) <= MAX_ERROR_RATIO
    report.expect(true, f"{name}: duration_s over the time of CUDA events: {ratio}", timed=True)
    report.fact(f"{name}: gpu_s over the same: {figures['true_times'].get('gpu_s')}")
