"""One GPU's calls do not return: what becomes of the others' readings and of the scrape."""

from __future__ import annotations

import re
import time
from typing import Any

from benchmarks.peers import GPUS, OURS, RunningPeer
from benchmarks.scraping import Scraper, burst, latency

HUNG_GPU = 3
# What a watchdog needs to notice, five seconds for ours, and a round of its own.
NOTICE_S = 7.0
# A GPU on whose lines nothing has changed for this long is frozen.
FROZEN_AFTER_S = 3.0
SCRAPES = 100

_GPU = re.compile(rb'[{,](?:gpu|index)="(\d+)"')
_STUCK = re.compile(rb'^warpwatch_device_up\{gpu="(\d+)",.*reason="(\w+)"\} 0', re.MULTILINE)


def measure(peers: tuple[RunningPeer, ...], window_s: float) -> dict[str, Any]:
    """By peer. The calls of the other GPUs stand for their sample rate, the page for its truth."""
    before = _calls_of_others(peers, window_s)
    for peer in peers:
        peer.driver.hang(gpu=HUNG_GPU)
    try:
        time.sleep(NOTICE_S)
        during = _calls_of_others(peers, window_s)
        return {
            peer.name: {
                "others_call_rate_ratio": round(during[peer.name] / before[peer.name], 3),
                **_while_hung(peer),
            }
            for peer in peers
        }
    finally:
        for peer in peers:
            peer.driver.hang(gpu=HUNG_GPU, on=False)


def _calls_of_others(peers: tuple[RunningPeer, ...], window_s: float) -> dict[str, int]:
    others = [gpu for gpu in range(GPUS) if gpu != HUNG_GPU]
    before = {peer.name: peer.calls(others) for peer in peers}
    time.sleep(window_s)
    return {peer.name: peer.calls(others) - before[peer.name] for peer in peers}


def _while_hung(peer: RunningPeer) -> dict[str, Any]:
    with Scraper(peer.port, gzip=False) as scraper:
        scraper.scrape()
        earlier = gpu_lines(scraper.body)
        time.sleep(FROZEN_AFTER_S)
        times_s = burst(scraper, SCRAPES)
        page = scraper.body
    now = gpu_lines(page)
    frozen = [gpu for gpu in range(GPUS) if gpu != HUNG_GPU and now.get(gpu) == earlier.get(gpu)]
    figures: dict[str, Any] = {"others_frozen": len(frozen), "scrape": latency(times_s)}
    if peer.name == OURS:
        figures["page_says"] = {int(m[1]): m[2].decode() for m in _STUCK.finditer(page)}
    return figures


def gpu_lines(page: bytes) -> dict[int, frozenset[bytes]]:
    """The samples of each GPU by its index."""
    lines: dict[int, set[bytes]] = {}
    for line in page.splitlines():
        found = _GPU.search(line)
        if found and not line.startswith(b"#"):
            lines.setdefault(int(found[1]), set()).add(line)
    return {gpu: frozenset(samples) for gpu, samples in lines.items()}
