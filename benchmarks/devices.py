"""Our daemon against two other exporters on the same fake driver: calls, processor, memory, page.

All peers run side by side for as long as one latency of the driver is measured. What they spend
is taken at the same time; what a scrape takes, in turns. ``README.md`` says more.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import isolation
from benchmarks.limits import MAX_RSS_MIB, at_least, at_most, scrape_limits
from benchmarks.peers import GPUS, OURS, PROFILE, RunningPeer, build_driver, running, versions
from benchmarks.processes import core_percents, is_quick, memory
from benchmarks.scraping import Scraper, burst, each_second, latency, sample_count

# What a call of the driver takes: nothing, and about what one takes on hardware.
LATENCIES_US = (0, 100)
SETTLE_S = 8.0
# A window in seconds, bursts of scrapes, and the window of a hung GPU.
FULL, QUICK = (60, 3, 10.0), (10, 1, 6.0)
SCRAPES = 100

MIN_SAMPLES = 1000
MAX_CALLS_PER_S_AND_GPU = 12.0
MAX_CPU_S_PER_MIN = {"0_us": 0.8, "100_us": 1.2}

Peers = tuple[RunningPeer, ...]


def measure() -> dict[str, Any]:
    """Raises CannotMeasure."""
    window_s, bursts, hang_s = QUICK if is_quick() else FULL
    about = {"gpus": GPUS, "profile": PROFILE, "window_s": window_s, "versions": versions()}
    by_latency: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="warpwatch-bench-") as name:
        folder = Path(name)
        library = build_driver(folder / "library")
        for latency_us in LATENCIES_US:
            with running(library, folder / str(latency_us), latency_us) as peers:
                time.sleep(SETTLE_S)
                by_latency[f"{latency_us}_us"] = compare(peers, window_s, bursts)
                if latency_us == LATENCIES_US[-1]:
                    hung = isolation.measure(peers, hang_s)
    return {
        **about,
        "by_call_latency": by_latency,
        "one_gpu_hangs": hung,
        "limits": limits({key: of[OURS] for key, of in by_latency.items()}, hung[OURS]),
    }


def compare(peers: Peers, window_s: int, bursts: int) -> dict[str, dict[str, Any]]:
    """All figures at one latency, by peer."""
    idle, scraped = (spent(peers, window_s, is_scraped) for is_scraped in (False, True))
    times: dict[str, list[float]] = {peer.name: [] for peer in peers}
    with scrapers(peers, gzip=True) as compressed, scrapers(peers, gzip=False) as plain:
        for _ in range(bursts):
            for name, scraper in compressed.items():
                times[name] += burst(scraper, SCRAPES)
        for scraper in plain.values():
            scraper.scrape()
        return {
            name: {
                "idle": idle[name],
                "scraped": scraped[name],
                "scrape": latency(times_s),
                "samples": sample_count(plain[name].body),
                "page_bytes": len(plain[name].body),
                "gzip_bytes": len(compressed[name].body),
            }
            for name, times_s in times.items()
        }


@contextlib.contextmanager
def scrapers(peers: Peers, *, gzip: bool) -> Iterator[dict[str, Scraper]]:
    with contextlib.ExitStack() as stack:
        yield {p.name: stack.enter_context(Scraper(p.port, gzip=gzip)) for p in peers}


def spent(peers: Peers, window_s: int, scraped: bool) -> dict[str, dict[str, Any]]:
    """Processor time and calls of ``window_s``, memory at its end; scraped each second or not."""
    times: dict[str, list[float]] = {peer.name: [] for peer in peers}
    calls_before = {peer.name: peer.calls() for peer in peers}
    with scrapers(peers, gzip=True) as by_name:
        percents = core_percents(
            {peer.name: peer.pid for peer in peers},
            lambda: each_second(by_name if scraped else {}, window_s, times),
        )
    figures: dict[str, dict[str, Any]] = {}
    for peer in peers:
        calls = peer.calls() - calls_before[peer.name]
        figures[peer.name] = {
            "cpu_s_per_min": round(0.6 * percents[peer.name], 3),
            "calls_per_s_and_gpu": round(calls / window_s / GPUS, 2),
            **memory(peer.pid)._asdict(),
        }
        if scraped:
            figures[peer.name]["scrape_p50_ms"] = latency(times[peer.name])["p50_ms"]
    return figures


def limits(ours: dict[str, dict[str, Any]], hung: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a limit. ``ours``: by the latency of a call; ``hung``: with a GPU that hangs."""
    rows = []
    for key, figures in ours.items():
        idle, scraped = figures["idle"], figures["scraped"]
        calls = max(idle["calls_per_s_and_gpu"], scraped["calls_per_s_and_gpu"])
        rss_mib = max(idle["rss_mib"], scraped["rss_mib"])
        cpu_s_per_min = scraped["cpu_s_per_min"]
        rows += [
            at_least(f"samples at {key}", figures["samples"], MIN_SAMPLES),
            at_most(f"NVML calls a second and GPU at {key}", calls, MAX_CALLS_PER_S_AND_GPU),
            at_most(f"CPU s a minute, scraped, at {key}", cpu_s_per_min, MAX_CPU_S_PER_MIN[key]),
            at_most(f"RSS in MiB at {key}", rss_mib, MAX_RSS_MIB),
            *scrape_limits(f"at {key}", figures["scrape"]),
        ]
    return [*rows, *scrape_limits("with a hung GPU", hung["scrape"])]
