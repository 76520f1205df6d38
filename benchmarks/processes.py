"""Starts measured processes, reads their cost, scrapes them, compares figures with limits."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import statistics
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


def wait_until(ready: Callable[[], Any], timeout_s: float = 30.0, poll_s: float = 0.1) -> Any:
    """Return the first true result of ``ready``; its errors mean not yet. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(WarpwatchError, OSError):
            if result := ready():
                return result
        time.sleep(poll_s)
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


# --- scrapes, as Prometheus does them ---

# The header of Prometheus 3.
ACCEPT = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
SCRAPE_TIMEOUT_S = 10.0
# This rate is below the one that our daemon allows one client.
BURST_INTERVAL_S = 0.022


class Scraper:
    """A client that keeps its connection while the exporter does.

    Connecting is part of the measured time. ``body`` is the newest page, as it was sent.
    """

    def __init__(self, port: int, *, gzip: bool) -> None:
        self.body = b""
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SCRAPE_TIMEOUT_S)
        self._headers = {
            "User-Agent": "Prometheus/3.5.0",
            "Accept": ACCEPT,
            "Accept-Encoding": "gzip" if gzip else "identity",
            "X-Prometheus-Scrape-Timeout-Seconds": "10",
        }

    def __enter__(self) -> Scraper:
        return self

    def __exit__(self, *error: object) -> None:
        self.disconnect()

    def scrape(self) -> float:
        """Return the seconds from the request to the last byte. Raises CannotMeasure."""
        began = time.perf_counter()
        try:
            self._connection.request("GET", "/metrics", headers=self._headers)
            reply = self._connection.getresponse()
            self.body = reply.read()
        except (OSError, http.client.HTTPException) as error:
            self.disconnect()
            cause = f"{type(error).__name__}: {error}"
            raise CannotMeasure(
                f"a scrape of port {self._connection.port} failed: {cause}"
            ) from error
        took_s = time.perf_counter() - began
        if reply.status != http.client.OK:
            raise CannotMeasure(
                f"port {self._connection.port} answered a scrape with {reply.status}"
            )
        return took_s

    def disconnect(self) -> None:
        """Disconnect; the next scrape connects again."""
        self._connection.close()


def sample_count(page: bytes) -> int:
    return sum(1 for line in page.splitlines() if line and not line.startswith(b"#"))


def latency(times_s: list[float]) -> dict[str, float]:
    p99_s = statistics.quantiles(times_s, n=100, method="inclusive")[98]
    p50_ms, p99_ms = round(1000 * statistics.median(times_s), 3), round(1000 * p99_s, 3)
    return {"p50_ms": p50_ms, "p99_ms": p99_ms, "scrapes": len(times_s)}


def burst(scraper: Scraper, scrapes: int) -> list[float]:
    """Return the seconds of each scrape at a steady rate, without the first, which connects."""
    times: list[float] = []
    # The exporter may have closed an idle connection.
    scraper.disconnect()
    scraper.scrape()
    due = time.monotonic()
    for _ in range(scrapes):
        times.append(scraper.scrape())
        due = max(due + BURST_INTERVAL_S, time.monotonic() + BURST_INTERVAL_S / 4)
        _sleep_until(due)
    return times


def each_second(
    scrapers: Mapping[str, Scraper], seconds: int, times: dict[str, list[float]]
) -> None:
    """Scrape each exporter once per second, and append the seconds of each scrape to ``times``."""
    began = time.monotonic()
    for second in range(seconds):
        for place, (name, scraper) in enumerate(scrapers.items()):
            _sleep_until(began + second + place / len(scrapers))
            times[name].append(scraper.scrape())
    _sleep_until(began + seconds)


def _sleep_until(due: float) -> None:
    time.sleep(max(0.0, due - time.monotonic()))
