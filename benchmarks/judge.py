"""``make judge``: recall, precision and delay of the detectors on labelled logs.

    make judge ARGS="--seeds 24"

Runs the judge of the evaluation folder (WARPWATCH_EVALUATION) on ``warpwatch replay``, then the
detectors on the jobs of ``from_start.py``, two per seed. Keeps the figures in RESULTS and writes
them as a table into DOCUMENT. The exit status is 2 if there is no judge.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import from_start
from benchmarks.processes import CannotMeasure, last_line

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results") / "judge.json"
DOCUMENT = ROOT / "docs/detection-methods.md"
EVALUATION = "WARPWATCH_EVALUATION"
SEEDS = 24
JOBS = 2
COMMAND = f"{shlex.quote(sys.executable)} -m warpwatch_daemon replay {{log}} --json"

# The 97.5 % quantile of the normal distribution.
Z_95 = 1.959964
CONFIDENCE = 0.95
ORIGINS = {"sim": "simulated runs", "real": "real runs"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make judge", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each simulated kind")
    parser.add_argument("--first-seed", type=int, default=0)
    given = parser.parse_args()
    try:
        results = {
            "warpwatch": judged(given.seeds, given.first_seed),
            "from_start": from_start.measure(2 * given.seeds, 2 * given.first_seed),
        }
    except CannotMeasure as error:
        print(f"judge: {error}", file=sys.stderr)
        return 2
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    DOCUMENT.write_text(into_document(DOCUMENT.read_text(), table(results)))
    print(json.dumps(results["warpwatch"]["summary"], indent=1))
    return 0


def judged(seeds: int, first_seed: int) -> dict[str, Any]:
    """Return the judge's figures. Raises CannotMeasure if there is no judge or it fails."""
    script = Path(os.environ.get(EVALUATION, "")) / "steps.py"
    if not os.environ.get(EVALUATION) or not script.is_file():
        raise CannotMeasure(f"{EVALUATION} must name the evaluation folder, in which steps.py is")
    counts = ["--seeds", str(seeds), "--first-seed", str(first_seed), "--jobs", str(JOBS)]
    done = subprocess.run(
        [sys.executable, str(script.absolute()), "judge", "--command", COMMAND, *counts],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if done.returncode:
        raise CannotMeasure(f"the judge failed: {last_line(done.stderr)}")
    result: dict[str, Any] = json.loads(done.stdout)
    for case in result["cases"].values():
        # The duration belongs to the machine.
        case.pop("seconds", None)
    return {"seeds": seeds, "first_seed": first_seed, **result}


# --- the table ---


def into_document(document: str, text: str) -> str:
    """Replace the text between the markers. Raises ValueError without markers."""
    before, begin, rest = document.partition("<!-- judge:begin -->")
    _, end, after = rest.partition("<!-- judge:end -->")
    if not (begin and end):
        raise ValueError("no markers judge:begin and judge:end in the document")
    return f"{before}{begin}\n{text}\n{end}{after}"


def table(results: dict[str, Any]) -> str:
    """Return one row per kind of run, then the totals."""
    ours = results["warpwatch"]
    first, last = ours["first_seed"], ours["first_seed"] + ours["seeds"] - 1
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
            _total(ours, origin),
        ]
    return "\n".join(lines)


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _kind(name: str, case: dict[str, Any]) -> str:
    recall = "-" if name.endswith("/none") else _recall(case["found"], case["runs"])
    unit = " s" if name == "sim/hang" else ""
    delays = ("-" if of is None else f"{of}{unit}" for of in (case["delay_p50"], case["delay_p95"]))
    return _row(name, case["runs"], recall, *delays, case["misnamed"], case["false"])


def _total(result: dict[str, Any], origin: str) -> str:
    cases = {key: case for key, case in result["cases"].items() if key.startswith(origin)}
    faults = [case for key, case in cases.items() if not key.endswith("/none")]
    # Real runs with a fault repeat the untouched ones, so only those count for the rate.
    quiet = [case for key, case in cases.items() if origin == "sim" or key.endswith("/none")]
    summary = result["summary"][origin]
    false = sum(case["false"] for case in quiet)
    days = sum(case["rank_hours"] for case in quiet) / 24
    return _row(
        "all",
        _recall(sum(case["found"] for case in faults), sum(case["runs"] for case in faults)),
        f"{summary['precision']:.3f}",
        f"{summary['f1']:.3f}",
        summary["misnamed"],
        sum(case["false"] for case in cases.values()),
        f"{false / days:.4f}",
        f"{poisson_upper(false) / days:.4f}",
    )


def _recall(found: int, runs: int) -> str:
    low, high = wilson(found, runs)
    return f"{found / runs:.2f} ({low:.2f} to {high:.2f})"


def wilson(found: int, runs: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share (Wilson 1927)."""
    share, spread = found / runs, Z_95**2 / runs
    middle = share + spread / 2
    half = math.sqrt(spread * (share * (1 - share) + spread / 4))
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def poisson_upper(count: int) -> float:
    """Return the mean above which so few events have less than 5 % probability (one-sided)."""
    low, high = float(count), 2.0 * count + 10.0
    for _ in range(60):
        mean = (low + high) / 2
        # Sum the terms by their logarithms, so that none overflows.
        logs = (k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(count + 1))
        likely = math.fsum(map(math.exp, logs)) > 1 - CONFIDENCE
        low, high = (mean, high) if likely else (low, mean)
    return high


if __name__ == "__main__":
    sys.exit(main())
