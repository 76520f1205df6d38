"""Compares the daemon with another exporter on the same fake driver.

Both run side by side for each latency of the driver. Each has a driver of its own, alike, that
counts its calls. Costs are measured at the same time, scrapes in turns. ``README.md`` explains the
figures.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.processes import (
    MAX_RSS_MIB,
    CannotMeasure,
    Scraper,
    at_least,
    at_most,
    burst,
    clean_environment,
    core_percents,
    daemon_arguments,
    each_second,
    is_quick,
    last_line,
    latency,
    rss_mib,
    sample_count,
    scrape_limits,
    start,
    stop,
    wait_until,
)
from tests.devices.fakenvml.driver import CannotBuild, FakeDriver, build
from warpwatch_daemon.demo.processes import free_port

GPUS = 8
PROFILE = "h100"
OURS = "warpwatch"
DISTRIBUTIONS = (OURS, "nvitop-exporter", "nvidia-ml-py", "prometheus-client")
# Values change as on a GPU that trains.
LOAD = {"load": 60, "load_swing": 30, "load_period_s": 20}
MEMORY_MIB = 40_960
INSTALL = "install the extra: pip install -e '.[bench]'"
# The time of a driver call: none, and about as on hardware.
LATENCIES_US = (0, 100)
SETTLE_S = 8.0
# A window in seconds, and bursts of scrapes.
FULL, QUICK = (60, 3), (10, 1)
SCRAPES = 100

MIN_SAMPLES = 1000
MAX_CALLS_PER_S_AND_GPU = 12.0
MAX_CPU_S_PER_MIN = {"0_us": 0.8, "100_us": 1.2}


@dataclass(frozen=True, slots=True)
class Exporter:
    name: str
    process: subprocess.Popen[bytes]
    port: int
    driver: FakeDriver

    @property
    def pid(self) -> int:
        """The process id. Raises CannotMeasure if the exporter has exited."""
        if self.process.poll() is not None:
            raise CannotMeasure(f"{self.name} ended with status {self.process.returncode}")
        return self.process.pid

    def calls(self) -> int:
        """Return the NVML calls so far; those for no GPU, such as waiting for events, count too."""
        return sum(sum(by_name.values()) for by_name in self.driver.calls().values())


Exporters = tuple[Exporter, ...]


def measure() -> dict[str, Any]:
    """Return the figures. Raises CannotMeasure."""
    window_s, bursts = QUICK if is_quick() else FULL
    about = {"gpus": GPUS, "profile": PROFILE, "window_s": window_s, "versions": _versions()}
    by_latency: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="warpwatch-bench-") as name:
        folder = Path(name)
        library = _build_driver(folder / "library")
        for latency_us in LATENCIES_US:
            with _running(library, folder / str(latency_us), latency_us) as exporters:
                time.sleep(SETTLE_S)
                by_latency[f"{latency_us}_us"] = compare(exporters, window_s, bursts)
    return {
        **about,
        "by_call_latency": by_latency,
        "limits": limits({key: of[OURS] for key, of in by_latency.items()}),
    }


def compare(exporters: Exporters, window_s: int, bursts: int) -> dict[str, dict[str, Any]]:
    figures = _spent(exporters, window_s)
    times: dict[str, list[float]] = {exporter.name: [] for exporter in exporters}
    with _scrapers(exporters, gzip=True) as by_name:
        for _ in range(bursts):
            for name, scraper in by_name.items():
                times[name] += burst(scraper, SCRAPES)
    with _scrapers(exporters, gzip=False) as by_name:
        for name, scraper in by_name.items():
            scraper.scrape()
            figures[name] |= {"scrape": latency(times[name]), "page_bytes": len(scraper.body)}
            figures[name]["samples"] = sample_count(scraper.body)
    return figures


@contextlib.contextmanager
def _scrapers(exporters: Exporters, *, gzip: bool) -> Iterator[dict[str, Scraper]]:
    with contextlib.ExitStack() as stack:
        yield {e.name: stack.enter_context(Scraper(e.port, gzip=gzip)) for e in exporters}


def _spent(exporters: Exporters, window_s: int) -> dict[str, dict[str, Any]]:
    times: dict[str, list[float]] = {exporter.name: [] for exporter in exporters}
    calls_before = {exporter.name: exporter.calls() for exporter in exporters}
    pids = {exporter.name: exporter.pid for exporter in exporters}
    with _scrapers(exporters, gzip=True) as by_name:
        percents = core_percents(pids, lambda: each_second(by_name, window_s, times))
    return {
        exporter.name: {
            "cpu_s_per_min": round(0.6 * percents[exporter.name], 3),
            "calls_per_s_and_gpu": round(
                (exporter.calls() - calls_before[exporter.name]) / window_s / GPUS, 2
            ),
            "rss_mib": rss_mib(exporter.pid),
            "scrape_each_second_p50_ms": latency(times[exporter.name])["p50_ms"],
        }
        for exporter in exporters
    }


def limits(ours: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per limit; ``ours`` has our figures by the latency of a call."""
    rows = []
    for key, figures in ours.items():
        calls, cpu_s_per_min = figures["calls_per_s_and_gpu"], figures["cpu_s_per_min"]
        rows += [
            at_least(f"samples at {key}", figures["samples"], MIN_SAMPLES),
            at_most(f"NVML calls a second and GPU at {key}", calls, MAX_CALLS_PER_S_AND_GPU),
            at_most(f"CPU s a minute, scraped, at {key}", cpu_s_per_min, MAX_CPU_S_PER_MIN[key]),
            at_most(f"RSS in MiB at {key}", figures["rss_mib"], MAX_RSS_MIB),
            *scrape_limits(f"at {key}", figures["scrape"]),
        ]
    return rows


# --- the exporters and their drivers ---


def _warpwatch(port: int, folder: Path) -> list[str]:
    """Return a daemon with all defaults except the kubelet, which another machine may have."""
    return daemon_arguments(folder, port, attribution={"kubelet_socket": "off"})


def _nvitop_exporter(port: int, folder: Path) -> list[str]:
    listen = ["--bind-address", "127.0.0.1", "--port", str(port), "--hostname", "localhost"]
    return ["-m", "nvitop_exporter", *listen]


# Python's arguments by exporter, for a port and a folder.
EXPORTERS: dict[str, Callable[[int, Path], list[str]]] = {
    OURS: _warpwatch,
    "nvitop_exporter": _nvitop_exporter,
}


def _versions() -> dict[str, str]:
    """Return the versions of all parts. Raises CannotMeasure if one is not installed."""
    try:
        return {name: metadata.version(name) for name in DISTRIBUTIONS}
    except metadata.PackageNotFoundError as error:
        raise CannotMeasure(f"{error.name} is not installed; {INSTALL}") from error


def _build_driver(folder: Path) -> Path:
    """Compile the fake driver. Raises CannotMeasure."""
    try:
        return build(folder)
    except CannotBuild as error:
        raise CannotMeasure(f"no fake driver: {error}; a C compiler and {INSTALL}") from error
    except subprocess.SubprocessError as error:
        raise CannotMeasure(f"the fake driver cannot be compiled: {error}") from error


@contextlib.contextmanager
def _running(library: Path, folder: Path, latency_us: float) -> Iterator[Exporters]:
    """Run all exporters until the end of the block, from when each serves its page."""
    with contextlib.ExitStack() as stack:
        exporters = []
        for name in EXPORTERS:
            exporters.append(_start(name, library, folder / name, latency_us))
            stack.callback(stop, exporters[-1].process)
        for exporter in exporters:
            _wait(exporter, folder / exporter.name / "log")
        yield tuple(exporters)


def _start(name: str, library: Path, folder: Path, latency_us: float) -> Exporter:
    folder.mkdir(parents=True)
    driver = FakeDriver(library, folder / "driver", PROFILE, GPUS, latency_us=latency_us, **LOAD)
    # Each GPU has a process, as during training; a real one, so that its name can be read.
    driver.processes(None, f"{os.getpid()}/{MEMORY_MIB}")
    port = free_port()
    environment = clean_environment() | driver.environment
    process = start(EXPORTERS[name](port, folder), environment, folder / "log")
    return Exporter(name, process, port, driver)


def _wait(exporter: Exporter, log: Path) -> None:
    def serves() -> bool:
        with socket.create_connection(("127.0.0.1", exporter.port)):
            return exporter.pid > 0

    try:
        wait_until(serves)
    except (TimeoutError, CannotMeasure) as error:
        wrote = last_line(log.read_text(errors="replace"))
        text = f"{exporter.name} serves no page: {error}; it wrote: {wrote}"
        raise CannotMeasure(text) from error
