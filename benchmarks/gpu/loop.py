"""Trains on the GPU: checks what the shim costs and whether its step times are true, then the loop.

The loop is fault, anomaly, capture, verdict; its traces are kept.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import CannotCheck, Report
from benchmarks.processes import LocalDaemon, output_of, running_daemon, wait_until
from warpwatch_daemon.demo.processes import NONE, Switch

# The steps of a turn by network and mode.
TRAINED = {
    ("perceptron", "eager"): 200,
    ("transformer", "eager"): 10,
    ("transformer", "compile"): 10,
    ("transformer", "graph"): 10,
}
TURNS, QUICK_TURNS, QUICK_STEPS = 15, 3, 3
TURNS_TIMEOUT_S = 100.0
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
                trained = ["turns", network, mode, setting.device, str(turns), str(steps)]
                command = ["-m", "benchmarks.gpu.training", *trained]
                environment = daemon.training_environment
                figures |= output_of("the training", command, environment, TURNS_TIMEOUT_S)
                time.sleep(LOGGED_S)
            figures["true_times"] = true_times(figures.pop("shim_turns"), log)
            judge(report, f"{network} {mode}", figures)


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


def judge(report: Report, name: str, figures: dict[str, Any]) -> None:
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


# --- from a fault to its verdict ---

JOB = "gpu-check"
# The daemon finds and captures this fault by itself; the others are captured by request.
STALL = "data_stall"
VERDICTS = {STALL: "data_loading", "item": "sync_bound", "pageable": "transfer_bound"}
VERDICTS[NONE] = "healthy"
STEPS = 3
# Larger traces are not kept: results are committed.
MAX_TRACE_BYTES = 2_000_000
# The healthy steps before the first fault.
BASELINE_STEPS, BASELINE_S = 100, 16.0
# After this time every recorded step has the fault.
SETTLE_S = 1.5
TIMEOUT_S = 60.0


def check_capture(report: Report) -> None:
    with report.part("training") as figures:
        report.setting.need_torch()
        with running_daemon(triggers={"cooldown_s": 0, "captures_per_hour": 100}) as daemon:
            command = ["-m", "benchmarks.gpu.training", "faults", JOB, str(daemon.folder / "fault")]
            with subprocess.Popen(
                [sys.executable, *command, report.setting.device], env=daemon.training_environment
            ) as process:
                try:
                    poll(lambda: has_baseline(daemon), process)
                    figures["healthy_step_s"] = daemon.ranks(JOB)[0]["recent_s"][-1]
                    for fault in VERDICTS:
                        capture(report, daemon, process, fault)
                finally:
                    process.terminate()


def capture(
    report: Report, daemon: LocalDaemon, process: subprocess.Popen[bytes], fault: str
) -> None:
    with report.part(fault) as figures:
        figures["begun_at"] = time.time()
        Switch(daemon.folder / "fault").set(fault)
        if fault != STALL:
            time.sleep(SETTLE_S)
            body = {"job": JOB, "kind": "torch", "steps": STEPS, "reason": f"fault {fault}"}
            # The request is refused while another capture runs.
            poll(lambda: daemon.api.post("/api/v1/captures", body), process)
        figures["capture"] = poll(lambda: ended(daemon, fault, figures["begun_at"]), process)
        conclude(report, daemon, fault, figures)


def ended(daemon: LocalDaemon, fault: str, since: float) -> Any:
    """Return the first capture of this fault that has an outcome."""
    anomaly_kind = fault if fault == STALL else None
    for capture in daemon.api.get("/api/v1/captures")["captures"]:
        if capture["request"]["anomaly_kind"] == anomaly_kind and capture["time"] >= since:
            return capture if capture["outcome"] is not None else None
    return None


def poll(ask: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    """Return the first true result of ``ask``. Raises TimeoutError, RuntimeError."""

    def asked() -> Any:
        if process.poll() is not None:
            raise RuntimeError("the training has ended; checks.log holds what it wrote")
        return ask()

    return wait_until(asked, TIMEOUT_S)


def has_baseline(daemon: LocalDaemon) -> bool:
    return any(
        time.time() - rank["first_time"] >= BASELINE_S and (rank["step"] or 0) >= BASELINE_STEPS
        for rank in daemon.ranks(JOB)
    )


def conclude(report: Report, daemon: LocalDaemon, fault: str, figures: dict[str, Any]) -> None:
    for anomaly in daemon.api.get("/api/v1/anomalies")["anomalies"]:
        if anomaly["kind"] == fault:
            after_s = round(anomaly["time"] - figures["begun_at"], 1)
            figures |= {"found_after_s": after_s, "summary": anomaly["summary"]}
            report.fact(f"{fault} found after {after_s} s: {anomaly['summary']}")
    capture = figures["capture"]
    took_s = (capture["end_time"] or time.time()) - capture["time"]
    text = f"capture of {fault}: {capture['outcome']} {capture['detail']}".rstrip()
    report.expect(capture["outcome"] == "complete", f"{text} in {took_s:.1f} s")
    verdict, expected = (capture["diagnosis"] or {}).get("verdict"), VERDICTS[fault]
    text = f"verdict of {fault}: {verdict}, expected {expected}"
    report.expect(verdict == expected, text, timed=True)
    for trace in (daemon.folder / "captures").rglob(f"{capture['id']}/*.pt.trace.json.gz"):
        size = figures["trace_bytes"] = trace.stat().st_size
        if size <= MAX_TRACE_BYTES:
            target = Path(report.setting.out) / "traces" / f"{fault}.pt.trace.json.gz"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(trace, target)
        report.fact(f"trace of {fault}: {size} bytes")
