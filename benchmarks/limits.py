"""What our daemon may cost on the fake driver, and whether it was kept."""

from __future__ import annotations

from typing import Any

MIN_SAMPLES = 1000
MAX_CALLS_PER_S_AND_GPU = 12.0
MAX_CPU_S_PER_MIN = {"0_us": 0.8, "100_us": 1.2}
GOAL_CPU_S_PER_MIN = {"0_us": 0.4}
MAX_P50_MS = 1.0
MAX_P99_MS = 3.0
MAX_RSS_MIB = 50.0


def judge(cells: dict[str, dict[str, Any]], hang: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a limit. ``cells``: ours by the latency of a call; ``hang``: with a hung GPU."""
    rows = []
    for key, cell in cells.items():
        calls = max(cell[mode]["calls_per_s_and_gpu"] for mode in ("idle", "scraped"))
        rss_mib = max(cell[mode]["rss_mib"] for mode in ("idle", "scraped"))
        spent = cell["scraped"]["cpu_s_per_min"]
        rows += [
            {
                "what": f"samples at {key}",
                "value": cell["samples"],
                "at_least": MIN_SAMPLES,
                "met": cell["samples"] >= MIN_SAMPLES,
            },
            _at_most(f"NVML calls a second and GPU at {key}", calls, MAX_CALLS_PER_S_AND_GPU),
            _at_most(f"CPU s a minute, scraped, at {key}", spent, MAX_CPU_S_PER_MIN[key]),
            _at_most(f"RSS in MiB at {key}", rss_mib, MAX_RSS_MIB),
            *_scrape(f"at {key}", list(cell["scrape"].values())),
        ]
        if key in GOAL_CPU_S_PER_MIN:
            goal = GOAL_CPU_S_PER_MIN[key]
            rows.append(_at_most(f"goal: CPU s a minute, scraped, at {key}", spent, goal))
    return [*rows, *_scrape("with a hung GPU", [hang["scrape"]])]


def _scrape(when: str, latencies: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Of the slowest format."""
    return [
        _at_most(f"scrape p50 in ms {when}", max(of["p50_ms"] for of in latencies), MAX_P50_MS),
        _at_most(f"scrape p99 in ms {when}", max(of["p99_ms"] for of in latencies), MAX_P99_MS),
    ]


def _at_most(what: str, value: float, limit: float) -> dict[str, Any]:
    return {"what": what, "value": value, "at_most": limit, "met": value <= limit}
