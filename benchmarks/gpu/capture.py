"""Checks the whole loop on the GPU: fault, anomaly, capture, verdict; keeps the traces."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Report
from benchmarks.processes import LocalDaemon, running_daemon
from warpwatch_daemon.demo.faults import NONE, Switch
from warpwatch_telemetry.errors import WarpwatchError

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
                    poll(lambda: has_baseline(daemon), "baseline of healthy steps", process)
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
            poll(lambda: daemon.api.post("/api/v1/captures", body), "leave to capture", process)
        figures["capture"] = poll(
            lambda: ended(daemon, fault, figures["begun_at"]), f"capture of {fault}", process
        )
        conclude(report, daemon, fault, figures)


def ended(daemon: LocalDaemon, fault: str, since: float) -> Any:
    """Return the first capture of this fault that has an outcome."""
    anomaly_kind = fault if fault == STALL else None
    for capture in daemon.api.get("/api/v1/captures")["captures"]:
        if capture["request"]["anomaly_kind"] == anomaly_kind and capture["time"] >= since:
            return capture if capture["outcome"] is not None else None
    return None


def poll(ask: Callable[[], Any], what: str, process: subprocess.Popen[bytes]) -> Any:
    """Return the first true result of ``ask``. Raises TimeoutError, RuntimeError."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError("the training has ended; checks.log holds what it wrote")
        with contextlib.suppress(WarpwatchError):
            if result := ask():
                return result
        time.sleep(0.1)
    raise TimeoutError(f"no {what} within {TIMEOUT_S:.0f} s")


def has_baseline(daemon: LocalDaemon) -> bool:
    return any(
        time.time() - rank["first_time"] >= BASELINE_S and (rank["step"] or 0) >= BASELINE_STEPS
        for rank in daemon.ranks(JOB)
    )


def conclude(report: Report, daemon: LocalDaemon, fault: str, figures: dict[str, Any]) -> None:
    """Keep the trace; report the anomaly, the outcome and the verdict."""
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
