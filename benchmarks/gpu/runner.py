"""Runs checks, each in a process group of its own with a deadline, and gathers what they found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import Setting
from benchmarks.gpu.results import overall

STOP_TIMEOUT_S = 5.0


def run_all(
    timeouts_s: dict[str, float], budget_s: float, setting: Setting, work: Path
) -> Iterator[dict[str, Any]]:
    """The result of each check as soon as there is one."""
    deadline = time.monotonic() + budget_s
    for name, timeout_s in timeouts_s.items():
        left_s = deadline - time.monotonic()
        if left_s < 1:
            yield {"check": name, "status": "skipped", "why": "the time for all checks is used up"}
        else:
            yield run_one(name, min(timeout_s, left_s), setting, work)


def run_one(name: str, timeout_s: float, setting: Setting, work: Path) -> dict[str, Any]:
    result_file, log = work / f"{name}.json", work / f"{name}.log"
    flags = [flag for flag in ("fake", "quick") if getattr(setting, flag)]
    if setting.device == "cpu":
        flags.append("cpu")
    command = ["-m", "benchmarks.gpu.child", name, str(result_file), str(setting.out), *flags]
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # What it leaves behind when it is killed goes with this folder.
            env={**os.environ, "TMPDIR": str(work)},
            start_new_session=True,
        )
    timed_out = not _ended(process, timeout_s)
    _stop_group(process)
    result = _read(result_file) or {"check": name, "parts": {}, "findings": []}
    if "status" not in result:
        where = f" in part {result.pop('running')}" if "running" in result else ""
        why = f"not done within {timeout_s:.0f} s" if timed_out else _ending(process, log)
        status = "timed_out" if timed_out else "failed"
        result |= {**overall(result), "status": status, "why": why + where}
    return {**result, "took_s": round(time.monotonic() - began, 1)}


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
        return True
    except subprocess.TimeoutExpired:
        return False


def _stop_group(process: subprocess.Popen[bytes]) -> None:
    """The check and whatever it has left behind. A call that is stuck in the driver stays."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if number is signal.SIGTERM and process.returncode is None:
            _ended(process, STOP_TIMEOUT_S)
    _ended(process, STOP_TIMEOUT_S)


def _ending(process: subprocess.Popen[bytes], log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() or ["nothing was said"]
    return f"it ended with {process.returncode}: {lines[-1][:200]}"


def _read(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        return result
    except (OSError, ValueError):
        return {}
