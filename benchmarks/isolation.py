"""One GPU's calls do not return: what becomes of the others' readings and of the scrape."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.peers import GPUS, OURS, RunningPeer
from benchmarks.scraping import Scraper, burst, latency

HUNG_GPU = 3
# What a watchdog needs to notice, five seconds for ours, and a round of its own.
NOTICE_S = 7.0
# A GPU on whose lines nothing has changed for this long is frozen.
FROZEN_AFTER_S = 3.0
RECOVERY_TIMEOUT_S = 20.0
SCRAPES = 100

_GPU = re.compile(rb'[{,](?:gpu|index)="(\d+)"')
_STUCK = re.compile(rb'^warpwatch_device_up\{gpu="(\d+)",.*reason="(\w+)"\} 0', re.MULTILINE)

Lines = Mapping[int, frozenset[bytes]]


def measure(peers: tuple[RunningPeer, ...], window_s: float) -> dict[str, Any]:
    """By peer. The calls of the other GPUs stand for their sample rate, the page for its truth."""
    before = _calls_per_s(peers, window_s)
    for peer in peers:
        peer.driver.hang(gpu=HUNG_GPU)
    time.sleep(NOTICE_S)
    during = _calls_per_s(peers, window_s)
    rows: dict[str, Any] = {peer.name: _hung(peer) for peer in peers}
    for peer in peers:
        peer.driver.hang(gpu=HUNG_GPU, on=False)
    for name, recovered_s in _recoveries(peers).items():
        rows[name]["recovered_after_s"] = recovered_s
    for peer in peers:
        rate_ratio = during[peer.name] / before[peer.name]
        rows[peer.name] = {"others_call_rate_ratio": round(rate_ratio, 3), **rows[peer.name]}
    return rows


def _calls_per_s(peers: tuple[RunningPeer, ...], window_s: float) -> dict[str, float]:
    """Of the GPUs that do not hang."""
    before = {peer.name: _others_calls(peer) for peer in peers}
    began = time.monotonic()
    time.sleep(window_s)
    elapsed_s = time.monotonic() - began
    return {peer.name: (_others_calls(peer) - before[peer.name]) / elapsed_s for peer in peers}


def _others_calls(peer: RunningPeer) -> int:
    return sum(
        sum(functions.values())
        for gpu, functions in peer.driver.calls().items()
        if gpu not in (None, HUNG_GPU)
    )


def _hung(peer: RunningPeer) -> dict[str, Any]:
    with Scraper(peer.port, gzip=False) as scraper:
        scraper.scrape()
        earlier = gpu_lines(scraper.body)
        time.sleep(FROZEN_AFTER_S)
        times_s = burst(scraper, SCRAPES)
        page = scraper.body
    now = gpu_lines(page)
    others = [gpu for gpu in range(GPUS) if gpu != HUNG_GPU]
    figures: dict[str, Any] = {
        "others_frozen": sum(1 for gpu in others if now.get(gpu) == earlier.get(gpu)),
        "scrape": asdict(latency(times_s)),
    }
    if peer.name == OURS:
        figures["page_says"] = {int(m[1]): m[2].decode() for m in _STUCK.finditer(page)}
    return figures


def _recoveries(peers: tuple[RunningPeer, ...]) -> dict[str, float | None]:
    """Seconds until the GPU's lines on the page change again; None: not within the time given."""
    began = time.monotonic()
    earlier = {peer.name: _hung_gpu_lines(peer) for peer in peers}
    found: dict[str, float | None] = {}
    while len(found) < len(peers) and time.monotonic() - began < RECOVERY_TIMEOUT_S:
        time.sleep(0.5)
        for peer in peers:
            if peer.name not in found and _hung_gpu_lines(peer) != earlier[peer.name]:
                found[peer.name] = round(time.monotonic() - began, 1)
    return {peer.name: found.get(peer.name) for peer in peers}


def _hung_gpu_lines(peer: RunningPeer) -> frozenset[bytes] | None:
    with Scraper(peer.port, gzip=False) as scraper:
        scraper.scrape()
        return gpu_lines(scraper.body).get(HUNG_GPU)


def gpu_lines(page: bytes) -> Lines:
    """The samples of each GPU by its index."""
    lines: dict[int, set[bytes]] = {}
    for line in page.splitlines():
        found = _GPU.search(line)
        if found and not line.startswith(b"#"):
            lines.setdefault(int(found[1]), set()).add(line)
    return {gpu: frozenset(samples) for gpu, samples in lines.items()}
