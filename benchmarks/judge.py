"""``make judge``: recall, precision and delay of the detectors on labelled logs.

    make judge ARGS="--seeds 24 --baselines"

Runs the judge of the evaluation folder (WARPWATCH_EVALUATION) on ``warpwatch replay`` and, with
``--baselines``, on the detectors of ``baselines.py``; then our detectors on the jobs of
``from_start.py``, two a seed. Keeps the figures in ``results/judge.json`` and writes the table of
DOCUMENT from them. Exit 2: there is no judge.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import from_start
from benchmarks.judge_table import into_document
from benchmarks.processes import CannotMeasure, last_line

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results") / "judge.json"
DOCUMENT = ROOT / "docs/detection-methods.md"
EVALUATION = "WARPWATCH_EVALUATION"
SEEDS = 24
JOBS = 2
PYTHON = shlex.quote(sys.executable)
OURS = f"{PYTHON} -m warpwatch_daemon replay {{log}} --json"
BASELINE = f"{PYTHON} -m benchmarks.baselines {{name}} {{{{log}}}}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make judge", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each simulated kind")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--baselines", action="store_true", help="measure the baselines too; else they are kept"
    )
    given = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    try:
        results |= measure(given.seeds, given.first_seed, given.baselines)
    except CannotMeasure as error:
        print(f"judge: {error}", file=sys.stderr)
        return 2
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    DOCUMENT.write_text(into_document(DOCUMENT.read_text(), results))
    print(json.dumps(results["warpwatch"]["summary"], indent=1))
    return 0


def measure(seeds: int, first_seed: int, with_baselines: bool) -> dict[str, Any]:
    """By detector. Raises CannotMeasure when there is no judge or it fails."""
    ours = judged("warpwatch", OURS, seeds, first_seed)
    results: dict[str, Any] = {"warpwatch": ours}
    results["from_start"] = from_start.measure(2 * seeds, 2 * first_seed)
    if with_baselines:
        for name in ("robust_z", "ewma_cusum"):
            results[name] = judged(name, BASELINE.format(name=name), seeds, first_seed)
        command = f"{BASELINE.format(name='chance')} {alarms_a_log(ours):.3f}"
        results["chance"] = judged("chance", command, seeds, first_seed)
    return results


def evaluation_script() -> Path:
    """The evaluation folder's. Raises CannotMeasure where there is none."""
    script = Path(os.environ.get(EVALUATION, "")) / "steps.py"
    if not os.environ.get(EVALUATION) or not script.is_file():
        raise CannotMeasure(f"{EVALUATION} must name the evaluation folder, in which steps.py is")
    return script.absolute()


def judged(name: str, command: str, seeds: int, first_seed: int) -> dict[str, Any]:
    script = evaluation_script()
    print(f"judging {name} …", file=sys.stderr, flush=True)
    counts = ["--seeds", str(seeds), "--first-seed", str(first_seed), "--jobs", str(JOBS)]
    done = subprocess.run(
        [sys.executable, str(script), "judge", "--command", command, *counts],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if done.returncode:
        raise CannotMeasure(f"the judge failed on {name}: {last_line(done.stderr)}")
    result: dict[str, Any] = json.loads(done.stdout)
    for case in result["cases"].values():
        # How long it took belongs to the machine.
        case.pop("seconds", None)
    return {"seeds": seeds, "first_seed": first_seed, **result}


def alarms_a_log(result: dict[str, Any]) -> float:
    cases = result["cases"].values()
    alarms = sum(case["found"] + case["misnamed"] + case["false"] for case in cases)
    return float(alarms / sum(case["runs"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
