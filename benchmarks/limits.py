"""Figures against their limits, and the limits of the daemon that several benchmarks share."""

from __future__ import annotations

from typing import Any

# With 8 devices.
MAX_RSS_MIB = 64.0
MAX_SCRAPE_P50_MS = 2.0
MAX_SCRAPE_P99_MS = 3.0


def at_most(what: str, value: float, limit: float) -> dict[str, Any]:
    return {"what": what, "value": value, "at_most": limit, "met": value <= limit}


def at_least(what: str, value: float, limit: float) -> dict[str, Any]:
    return {"what": what, "value": value, "at_least": limit, "met": value >= limit}


def scrape_limits(when: str, latency: dict[str, float]) -> list[dict[str, Any]]:
    return [
        at_most(f"scrape p50 in ms {when}", latency["p50_ms"], MAX_SCRAPE_P50_MS),
        at_most(f"scrape p99 in ms {when}", latency["p99_ms"], MAX_SCRAPE_P99_MS),
    ]
