"""Our daemon against two other exporters on the same fake driver: calls, processor, memory, page.

All peers run side by side for as long as one latency of the driver is measured. What they spend
is taken at the same time, in windows; what a scrape takes, in turns. ``README.md`` says more.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import isolation
from benchmarks.limits import judge
from benchmarks.peers import GPUS, OURS, PEERS, PROFILE, RunningPeer, build_driver, running
from benchmarks.processes import CannotMeasure, cpu_s, memory
from benchmarks.scraping import Scraper, burst, latency, sample_count

# What a call of the driver takes; about what one takes on hardware, and nothing.
LATENCIES_US = (0, 100)
FORMATS = {"gzip": True, "plain": False}
# Longer than any page is kept ready; what is scraped each 15 or 30 s meets the same.
SELDOM_S = 3.0
# What the processor is asked for in a window: nothing but the loops, or a scrape a second too.
MODES = ("idle", "scraped")

_PREFIX = "WARPWATCH_BENCH_DEVICES_"


@dataclass(frozen=True, slots=True)
class Plan:
    """How long is measured: ``rounds`` windows of each mode, ``scrapes`` a round and format, and
    ``seldom`` scrapes with pauses. ``settle_s`` comes before, ``hang_s`` is a hung GPU's window.
    """

    settle_s: float = 8.0
    window_s: float = 20.0
    rounds: int = 3
    scrapes: int = 100
    seldom: int = 10
    hang_s: float = 10.0

    @classmethod
    def from_environment(cls) -> Plan:
        """WARPWATCH_BENCH_DEVICES_WINDOW_S and so on; WARPWATCH_BENCH_QUICK for a short one."""
        quick: dict[str, Any] = {
            "settle_s": 5,
            "window_s": 10,
            "rounds": 1,
            "seldom": 4,
            "hang_s": 6,
        }
        values = quick if os.environ.get("WARPWATCH_BENCH_QUICK") else {}
        for name, default in asdict(cls()).items():
            text = os.environ.get(_PREFIX + name.upper())
            try:
                values |= {name: type(default)(text)} if text else {}
            except ValueError as error:
                raise CannotMeasure(f"{_PREFIX}{name.upper()}: {error}") from error
        return cls(**values)


def measure() -> dict[str, Any]:
    """Raises CannotMeasure."""
    plan = Plan.from_environment()
    versions = {peer.name: peer.version for peer in PEERS}
    cells: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="warpwatch-bench-") as name:
        folder = Path(name)
        library = build_driver(folder / "library")
        for latency_us in LATENCIES_US:
            with running(library, folder / str(latency_us), latency_us) as peers:
                cells[f"{latency_us}_us"] = _stage(peers, plan)
                if latency_us == LATENCIES_US[-1]:
                    isolated = isolation.measure(peers, plan.hang_s)
    return {
        "gpus": GPUS,
        "profile": PROFILE,
        "python": sys.version.split()[0],
        "nvidia_ml_py": metadata.version("nvidia-ml-py"),
        "versions": versions,
        "plan": asdict(plan),
        "by_call_latency": cells,
        "one_gpu_hangs": isolated,
        "limits": judge({key: cell[OURS] for key, cell in cells.items()}, isolated[OURS]),
    }


def _stage(peers: tuple[RunningPeer, ...], plan: Plan) -> dict[str, Any]:
    """Everything of all peers at one latency."""
    began = time.monotonic()
    time.sleep(plan.settle_s)
    cells: dict[str, dict[str, Any]] = {peer.name: {} for peer in peers}
    for mode in MODES:
        for name, figures in _windows(peers, plan, mode).items():
            cells[name][mode] = figures
        for peer in peers:
            used = memory(peer.pid)
            cells[peer.name][mode] |= {
                "rss_mib": round(used.rss_bytes / 2**20, 1),
                "pss_mib": round(used.pss_bytes / 2**20, 1),
                "age_s": round(time.monotonic() - began),
            }
    for name, page in _bursts(peers, plan).items():
        cells[name] |= page
    for name, times_s in _seldom(peers, plan).items():
        cells[name]["scrape_seldom_p50_ms"] = latency(times_s).p50_ms
    return cells


# --- what is spent ---


def _windows(peers: tuple[RunningPeer, ...], plan: Plan, mode: str) -> dict[str, dict[str, Any]]:
    """Processor time of each window, and the calls of all of them."""
    spent: dict[str, list[float]] = {peer.name: [] for peer in peers}
    times: dict[str, list[float]] = {peer.name: [] for peer in peers}
    calls_before = {peer.name: _call_counts(peer) for peer in peers}
    began = time.monotonic()
    for _ in range(plan.rounds):
        before = {peer.name: (cpu_s(peer.pid), time.monotonic()) for peer in peers}
        if mode == "scraped":
            _scrape_each_second(peers, plan.window_s, times)
        else:
            time.sleep(plan.window_s)
        for peer in peers:
            cpu_before_s, since = before[peer.name]
            share = (cpu_s(peer.pid) - cpu_before_s) / (time.monotonic() - since)
            spent[peer.name].append(60 * share)
    elapsed_s = time.monotonic() - began
    figures = {}
    for peer in peers:
        called = _call_counts(peer) - calls_before[peer.name]
        figures[peer.name] = _spent(peer, spent[peer.name], called, elapsed_s)
        if mode == "scraped":
            figures[peer.name]["scrape_each_second_p50_ms"] = latency(times[peer.name]).p50_ms
    return figures


def _spent(
    peer: RunningPeer, cpu_s_per_min: list[float], called: Counter[str], elapsed_s: float
) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "cpu_s_per_min": round(statistics.median(cpu_s_per_min), 3),
        "cpu_s_per_min_range": [round(min(cpu_s_per_min), 3), round(max(cpu_s_per_min), 3)],
        "calls_per_s_and_gpu": round(called.total() / elapsed_s / GPUS, 2),
    }
    if peer.name == OURS:
        figures["calls_per_s_and_gpu_by_function"] = {
            function: round(count / elapsed_s / GPUS, 3) for function, count in called.most_common()
        }
    return figures


def _call_counts(peer: RunningPeer) -> Counter[str]:
    """How often each function was called so far, for any GPU or none."""
    counts: Counter[str] = Counter()
    for functions in peer.driver.calls().values():
        counts.update(functions)
    return counts


def _scrape_each_second(
    peers: tuple[RunningPeer, ...], window_s: float, times: dict[str, list[float]]
) -> None:
    """As Prometheus does, one peer after the other; adds what each scrape took to ``times``."""
    with ExitStack() as stack:
        scrapers = {p.name: stack.enter_context(Scraper(p.port, gzip=True)) for p in peers}
        due = time.monotonic()
        for _ in range(max(1, round(window_s))):
            for name, scraper in scrapers.items():
                times[name].append(scraper.scrape())
                due += 1 / len(scrapers)
                time.sleep(max(0.0, due - time.monotonic()))


# --- the page ---


def _bursts(peers: tuple[RunningPeer, ...], plan: Plan) -> dict[str, dict[str, Any]]:
    """What many scrapes take, by peer and format, in turns."""
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        scrapers = {
            (peer.name, form): stack.enter_context(Scraper(peer.port, gzip=gzip))
            for peer in peers
            for form, gzip in FORMATS.items()
        }
        times: dict[tuple[str, str], list[float]] = {key: [] for key in scrapers}
        for _ in range(plan.rounds):
            for key, scraper in scrapers.items():
                times[key] += burst(scraper, plan.scrapes)
        for peer in peers:
            plain = scrapers[peer.name, "plain"]
            found[peer.name] = {
                "samples": sample_count(plain.body),
                "page_bytes": {form: scrapers[peer.name, form].body_bytes for form in FORMATS},
                "scrape": {form: asdict(latency(times[peer.name, form])) for form in FORMATS},
                "keeps_connection": plain.connections < plan.rounds * plan.scrapes,
            }
    return found


def _seldom(peers: tuple[RunningPeer, ...], plan: Plan) -> dict[str, list[float]]:
    """Seconds of scrapes with pauses between them."""
    times: dict[str, list[float]] = {peer.name: [] for peer in peers}
    with ExitStack() as stack:
        scrapers = {p.name: stack.enter_context(Scraper(p.port, gzip=True)) for p in peers}
        for scraper in scrapers.values():
            scraper.scrape()
        for _ in range(plan.seldom):
            for name, scraper in scrapers.items():
                time.sleep(SELDOM_S / len(scrapers))
                times[name].append(scraper.scrape())
    return times
