"""Starting what is measured, and what a process has cost so far."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from warpwatch_telemetry.errors import WarpwatchError

STOP_TIMEOUT_S = 5.0


class CannotMeasure(Exception):
    """A benchmark cannot be run here; the one line says why and what would help."""


class ProcessMemory(NamedTuple):
    rss_mib: float
    pss_mib: float


def is_quick() -> bool:
    """Whether the run is to be short: its figures then say little."""
    return bool(os.environ.get("WARPWATCH_BENCH_QUICK"))


def clean_environment() -> dict[str, str]:
    """Ours without what configures a daemon."""
    return {k: v for k, v in os.environ.items() if not k.startswith("WARPWATCH_")}


def start(
    arguments: list[str], environment: Mapping[str, str], log: Path | None = None
) -> subprocess.Popen[bytes]:
    """A Python process; ``log`` takes what it writes."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log else subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, *arguments], env=environment, stdout=output, stderr=output
        )


def answer_of(
    what: str,
    arguments: list[str],
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> Any:
    """The JSON that a Python process prints last. Raises CannotMeasure: ``what`` gave none."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=clean_environment() if environment is None else environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotMeasure(f"{what} took more than {timeout_s:.0f} s") from error
    if done.returncode:
        raise CannotMeasure(f"{what} ended with {done.returncode}: {last_line(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])


def stop(process: subprocess.Popen[bytes]) -> None:
    """By a signal first, so that a process can end its own children."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(ready: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(WarpwatchError, OSError):
            if ready():
                return
        time.sleep(0.1)
    raise TimeoutError(f"not ready within {timeout_s} s")


def last_line(text: str) -> str:
    """What a process said last, for a message of one line."""
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "it wrote nothing"


def cpu_s(pid: int) -> float:
    """User and system seconds of a process and its children, in steps of 10 ms."""
    process = psutil.Process(pid)
    # Those of its children that have ended are among its own four.
    spent_s = sum(process.cpu_times()[:4])
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            spent_s += sum(child.cpu_times()[:2])
    return float(spent_s)


def core_percents(pids: Mapping[str, int], during: Callable[[], object]) -> dict[str, float]:
    """Processor time of each process while ``during`` runs, in percent of one core."""
    spent_s, began = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
    during()
    elapsed_s = time.monotonic() - began
    return {name: 100 * (cpu_s(pid) - spent_s[name]) / elapsed_s for name, pid in pids.items()}


def memory(pid: int) -> ProcessMemory:
    """Of a process and its children."""
    process = psutil.Process(pid)
    rss_bytes = pss_bytes = 0
    for member in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            info = member.memory_full_info()
            rss_bytes += info.rss
            pss_bytes += info.pss
    return ProcessMemory(round(rss_bytes / 2**20, 1), round(pss_bytes / 2**20, 1))
