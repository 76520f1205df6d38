"""The table of what the detectors find, from the figures that ``make judge`` has kept."""

from __future__ import annotations

import math
from typing import Any

BEGIN, END = "<!-- judge:begin -->", "<!-- judge:end -->"
# 97.5 % quantile of the normal distribution.
Z_95 = 1.959964
CONFIDENCE = 0.95
NAMES = {
    "warpwatch": "**Warpwatch**",
    "robust_z": "robust z > 6, five in a row (baseline)",
    "ewma_cusum": "EWMA-CUSUM, k 1.5, h 20 (baseline)",
    "chance": "random alarms at Warpwatch's rate (baseline)",
    "nothing": "do nothing (baseline)",
}
ORIGINS = {"sim": "simulated runs", "real": "real runs"}


def into_document(document: str, results: dict[str, Any]) -> str:
    """``document`` with a new table between the markers. Raises ValueError without these."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"no {BEGIN} and {END} in the document")
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def table(results: dict[str, Any]) -> str:
    """One row a kind of run, then one row a detector for all of them."""
    ours = results["warpwatch"]
    first, last = ours["first_seed"], ours["first_seed"] + ours["seeds"] - 1
    # Baselines that were measured on other runs than ours are no measure.
    known = {name: one for name, one in results.items() if _runs(one) == _runs(ours)}
    known["nothing"] = _nothing(ours)
    cases = ours["cases"] | results.get("from_start", {"cases": {}})["cases"]
    lines = [
        f"Seeds {first} to {last} of each simulated kind, twice as many from the start.",
        "",
        "| kind of run | runs | recall (95 %) | delay p50 | p95 | misnamed | false |",
        "|---|---|---|---|---|---|---|",
        *(_kind(name, case) for name, case in cases.items()),
    ]
    for origin in [origin for origin in ORIGINS if origin in ours["summary"]]:
        lines += [
            "",
            f"| {ORIGINS[origin]} | recall (95 %) | precision | F1 | misnamed | false |"
            " false a rank-day | at most (95 %) |",
            "|---|---|---|---|---|---|---|---|",
            *(_total(NAMES[name], known[name], origin) for name in NAMES if name in known),
        ]
    return "\n".join(lines)


def _runs(result: dict[str, Any]) -> tuple[int, int]:
    return result["first_seed"], result["seeds"]


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _kind(name: str, case: dict[str, Any]) -> str:
    recall = "-" if name.endswith("/none") else _recall(case["found"], case["runs"])
    unit = " s" if name == "sim/hang" else ""
    delays = ("-" if of is None else f"{of}{unit}" for of in (case["delay_p50"], case["delay_p95"]))
    return _row(name, case["runs"], recall, *delays, case["misnamed"], case["false"])


def _total(name: str, result: dict[str, Any], origin: str) -> str:
    cases = {key: case for key, case in result["cases"].items() if key.startswith(origin)}
    faults = [case for key, case in cases.items() if not key.endswith("/none")]
    # Of the real runs only the untouched ones count: the others repeat them.
    quiet = [case for key, case in cases.items() if origin == "sim" or key.endswith("/none")]
    summary = result["summary"][origin]
    false = sum(case["false"] for case in quiet)
    days = sum(case["rank_hours"] for case in quiet) / 24
    return _row(
        name,
        _recall(sum(case["found"] for case in faults), sum(case["runs"] for case in faults)),
        f"{summary['precision']:.3f}",
        f"{summary['f1']:.3f}",
        summary["misnamed"],
        sum(case["false"] for case in cases.values()),
        f"{false / days:.4f}",
        f"{poisson_upper(false) / days:.4f}",
    )


def _nothing(ours: dict[str, Any]) -> dict[str, Any]:
    """What never raises anything, on the same runs."""
    silent = {"found": 0, "misnamed": 0, "false": 0}
    summary = {"precision": 0.0, "f1": 0.0, "misnamed": 0}
    return {
        "cases": {name: case | silent for name, case in ours["cases"].items()},
        "summary": dict.fromkeys(ours["summary"], summary),
    }


def _recall(found: int, runs: int) -> str:
    low, high = wilson(found, runs)
    return f"{found / runs:.2f} ({low:.2f} to {high:.2f})"


def wilson(found: int, runs: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927)."""
    share, spread = found / runs, Z_95**2 / runs
    middle = share + spread / 2
    half = math.sqrt(spread * (share * (1 - share) + spread / 4))
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def poisson_upper(count: int) -> float:
    """The mean above which so few events have less than 5 % probability (exact, one-sided)."""
    low, high = float(count), 2.0 * count + 10.0
    for _ in range(60):
        mean = (low + high) / 2
        # Terms by logarithm, so that none overflows.
        logs = (k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(count + 1))
        likely = math.fsum(map(math.exp, logs)) > 1 - CONFIDENCE
        low, high = (mean, high) if likely else (low, mean)
    return high
