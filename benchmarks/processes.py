"""Starts daemons and other measured processes, reads their cost, compares figures with limits."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from warpwatch_daemon.api_client import ApiClient, socket_path
from warpwatch_daemon.demo.processes import free_port
from warpwatch_telemetry.errors import WarpwatchError

STOP_TIMEOUT_S = 5.0
# Limits of the daemon with 8 devices, which several benchmarks share.
MAX_RSS_MIB = 64.0
MAX_SCRAPE_P50_MS, MAX_SCRAPE_P99_MS = 2.0, 3.0


class CannotMeasure(Exception):
    """Raised with one line: why a benchmark cannot run here, and the fix."""


def at_most(what: str, value: float, limit: float) -> dict[str, Any]:
    return {"what": what, "value": value, "at_most": limit, "met": value <= limit}


def at_least(what: str, value: float, limit: float) -> dict[str, Any]:
    return {"what": what, "value": value, "at_least": limit, "met": value >= limit}


def scrape_limits(when: str, latency: dict[str, float]) -> list[dict[str, Any]]:
    return [
        at_most(f"scrape p50 in ms {when}", latency["p50_ms"], MAX_SCRAPE_P50_MS),
        at_most(f"scrape p99 in ms {when}", latency["p99_ms"], MAX_SCRAPE_P99_MS),
    ]


def is_quick() -> bool:
    """Return whether the run is shortened; its figures then mean little."""
    return bool(os.environ.get("WARPWATCH_BENCH_QUICK"))


def clean_environment() -> dict[str, str]:
    """Return our environment without the variables that configure a daemon."""
    return {k: v for k, v in os.environ.items() if not k.startswith("WARPWATCH_")}


def start(
    arguments: list[str], environment: Mapping[str, str], log: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a Python process; its output goes to ``log``."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log else subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, *arguments], env=environment, stdout=output, stderr=output
        )


def output_of(
    what: str,
    arguments: list[str],
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> Any:
    """Return the JSON that a Python process prints last. Raises CannotMeasure if it prints none."""
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
    """Terminate the process, so that it can stop its own children; kill it after a timeout."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(ready: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Poll until ``ready`` returns true; its errors mean not yet. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(WarpwatchError, OSError):
            if ready():
                return
        time.sleep(0.1)
    raise TimeoutError(f"not ready within {timeout_s} s")


def last_line(text: str) -> str:
    """Return the last line of a process's output, for a message of one line."""
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "it wrote nothing"


def cpu_s(pid: int) -> float:
    """Return user and system seconds of a process and its children, in steps of 10 ms."""
    process = psutil.Process(pid)
    # The first four figures include the children that have exited.
    spent_s = sum(process.cpu_times()[:4])
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            spent_s += sum(child.cpu_times()[:2])
    return float(spent_s)


def core_percents(pids: Mapping[str, int], during: Callable[[], object]) -> dict[str, float]:
    """Return the processor time of each process while ``during`` runs, in percent of one core."""
    spent_s, began = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
    during()
    elapsed_s = time.monotonic() - began
    return {name: 100 * (cpu_s(pid) - spent_s[name]) / elapsed_s for name, pid in pids.items()}


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process and its children."""
    process = psutil.Process(pid)
    rss_bytes = 0
    for member in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            rss_bytes += member.memory_info().rss
    return round(rss_bytes / 2**20, 1)


# --- a daemon ---


@dataclass(frozen=True, slots=True)
class LocalDaemon:
    pid: int
    port: int
    folder: Path
    api: ApiClient

    @property
    def training_environment(self) -> dict[str, str]:
        """The environment with which a training process finds this daemon."""
        return {
            **clean_environment(),
            "WARPWATCH_DIR": str(self.folder / "run"),
            "WARPWATCH_INBOX": str(self.folder / "inbox"),
            "WARPWATCH_ATTACH_INTERVAL_S": "0.2",
        }

    def devices(self) -> list[dict[str, Any]]:
        """Return the devices that are up, their series without ``device_``."""
        return [
            device | {"values": {s.removeprefix("device_"): v for s, v in device["values"].items()}}
            for device in self.api.get("/api/v1/devices")["devices"]
            if device["up"]
        ]

    def ranks(self, job: str) -> list[dict[str, Any]]:
        return [rank for rank in self.api.get("/api/v1/ranks")["ranks"] if rank["job"] == job]


def daemon_arguments(folder: Path, port: int, **sections: Any) -> list[str]:
    """Return Python's arguments for a daemon; ``sections`` are added to its configuration."""
    config: dict[str, Any] = {
        "http": {"listen": f"127.0.0.1:{port}"},
        "rendezvous": {"dir": str(folder / "run"), "inbox": str(folder / "inbox")},
        "store": {"url": (folder / "captures").as_uri()},
    }
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section if isinstance(section, dict) else section
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return ["-m", "warpwatch_daemon", "daemon", "--config", str(path)]


@contextlib.contextmanager
def running_daemon(**sections: Any) -> Iterator[LocalDaemon]:
    """Run a daemon from its first reply to the end of the block.

    Raises CannotMeasure, TimeoutError.
    """
    with tempfile.TemporaryDirectory(prefix="warpwatch-bench-") as name:
        folder, port = Path(name), free_port()
        log = folder / "daemon.log"
        api = ApiClient(f"http://127.0.0.1:{port}", socket_path=socket_path(folder / "run"))
        process = start(daemon_arguments(folder, port, **sections), clean_environment(), log)
        try:
            wait_until(lambda: process.poll() is not None or api.get("/healthz"))
            if process.returncode is not None:
                reason = last_line(log.read_text(errors="replace"))
                raise CannotMeasure(f"the daemon ended with {process.returncode}: {reason}")
            yield LocalDaemon(process.pid, port, folder, api)
        finally:
            stop(process)
