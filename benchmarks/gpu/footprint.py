"""What the daemon costs at one sample a second on the real driver."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.check import Finding, Part, Setting
from benchmarks.gpu.node import Node, running_node
from benchmarks.processes import cpu_s, memory, wait_until
from benchmarks.scraping import Scraper, burst, latency, sample_count

MAX_CORE_PERCENT = 0.5
MAX_RSS_MIB = 50.0
MAX_P50_MS, MAX_P99_MS = 1.0, 3.0
# Start-up is not the price of a sample.
SETTLE_S = 6.0
WINDOW_S = 30.0
SCRAPES = 300
EVENTS = "event_wait"

_COUNTS = re.compile(
    rb'^warpwatch_nvml_(calls|call_seconds)_total\{reader="([^"]+)"\} (\S+)', re.MULTILINE
)


def parts(setting: Setting) -> Iterator[Part]:
    yield Part("daemon", lambda: measure(setting), lambda m: findings(m, judged=not setting.quick))


def measure(setting: Setting) -> dict[str, Any]:
    log: dict[str, Any] = {"exporters": {"jsonl": {"path": None}}}
    with running_node(**log) as node:
        wait_until(node.devices)
        time.sleep(setting.seconds(SETTLE_S, 0.5))
        window_s = setting.seconds(WINDOW_S, 1.0)
        figures: dict[str, Any] = {"gpus": len(node.devices()), "window_s": window_s}
        for mode in ("idle", "scraped"):
            figures[mode] = _window(node, window_s, mode == "scraped")
        with Scraper(node.port, gzip=True) as scraper:
            times_s = burst(scraper, setting.count(SCRAPES, 10))
        figures["scrape"] = asdict(latency(times_s))
        with Scraper(node.port, gzip=False) as plain:
            plain.scrape()
            figures["samples"] = sample_count(plain.body)
        used = memory(node.pid)
    figures["rss_mib"] = round(used.rss_bytes / 2**20, 1)
    figures["pss_mib"] = round(used.pss_bytes / 2**20, 1)
    return figures


def _window(node: Node, window_s: float, scraped: bool) -> dict[str, Any]:
    calls_before, seconds_before = _nvml_counts(node)
    spent_s, began = cpu_s(node.pid), time.monotonic()
    if scraped:
        _scrape_each_second(node, window_s)
    else:
        time.sleep(window_s)
    spent_s, elapsed_s = cpu_s(node.pid) - spent_s, time.monotonic() - began
    calls, seconds = _nvml_counts(node)
    calls.subtract(calls_before)
    # Waiting for events is no work.
    nvml_s = sum(
        spent - seconds_before.get(reader, 0.0)
        for reader, spent in seconds.items()
        if reader != EVENTS
    )
    return {
        "core_percent": round(100 * spent_s / elapsed_s, 3),
        "nvml_calls_per_s": round(calls.total() / elapsed_s, 2),
        "nvml_ms_per_s": round(1000 * nvml_s / elapsed_s, 3),
        "calls_per_s_by_reader": {
            reader: round(count / elapsed_s, 2) for reader, count in calls.most_common()
        },
    }


def _scrape_each_second(node: Node, window_s: float) -> None:
    began = time.monotonic()
    with Scraper(node.port, gzip=True) as scraper:
        for due in range(1, round(window_s) + 1):
            scraper.scrape()
            time.sleep(max(0.0, began + due - time.monotonic()))


def _nvml_counts(node: Node) -> tuple[Counter[str], dict[str, float]]:
    """Calls and seconds by reader, as the daemon counts them itself."""
    calls: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    with Scraper(node.port, gzip=False) as scraper:
        scraper.scrape()
        for what, reader, value in _COUNTS.findall(scraper.body):
            if what == b"calls":
                calls[reader.decode()] = int(float(value))
            else:
                seconds[reader.decode()] = float(value)
    return calls, seconds


def findings(measured: dict[str, Any], judged: bool) -> Iterable[Finding]:
    """``judged``: whether the windows were long enough to hold against the limits."""
    for finding in _against_limits(measured):
        yield finding if judged else Finding(None, finding.text)


def _against_limits(measured: dict[str, Any]) -> Iterable[Finding]:
    for mode in ("idle", "scraped"):
        window = measured[mode]
        share = window["core_percent"]
        text = f"{mode}: {share:.2f} % of a core (limit {MAX_CORE_PERCENT} %)"
        text += f", {window['nvml_calls_per_s']:.1f} NVML calls a second"
        text += f" that take {window['nvml_ms_per_s']:.2f} ms"
        yield Finding(share <= MAX_CORE_PERCENT, text)
    rss_mib = measured["rss_mib"]
    yield Finding(rss_mib <= MAX_RSS_MIB, f"RSS {rss_mib} MiB (limit {MAX_RSS_MIB:.0f})")
    scrape = measured["scrape"]
    text = f"scrape of {measured['samples']} samples: p50 {scrape['p50_ms']:.2f} ms"
    text += f" (limit {MAX_P50_MS:.0f}), p99 {scrape['p99_ms']:.2f} ms (limit {MAX_P99_MS:.0f})"
    yield Finding(scrape["p50_ms"] <= MAX_P50_MS and scrape["p99_ms"] <= MAX_P99_MS, text)
