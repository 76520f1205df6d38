"""Whether the diagnosis names faults that were injected into real trainings on the CPU.

``python -m benchmarks.verdicts FOLDER`` records every fault with three models (the program is
``tests/diagnosis/recorded_faults.py``), diagnoses each trace by itself and prints one JSON object.
A trace that is in FOLDER already is not recorded again. Needs torch; 10 minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from warpwatch_diagnosis.diagnosis import diagnose

PROGRAM = Path(__file__).parents[1] / "tests" / "diagnosis" / "recorded_faults.py"
MODELS = ("perceptron", "convolutional", "transformer")
REPETITIONS = 2
EXPECTED = {
    "healthy": "healthy",
    "no_workers": "data_loading",
    "slow_collate": "data_loading",
    "tiny_operators": "host_bound",
    "item": "sync_bound",
    "garbage_collection": "gc_pause",
    "checkpoint": "checkpoint",
    "recompilation": "recompilation",
    "graph_breaks": "recompilation",
}
# Without stacks no event shows a garbage collection.
WITHOUT_STACKS = EXPECTED | {"garbage_collection": "host_bound"}
# Where stacks show more, and where they must change nothing.
STACKED = ("healthy", "item", "garbage_collection", "checkpoint")
WITH_STACKS = {fault: EXPECTED[fault] for fault in STACKED}


def measure(folder: Path) -> dict[str, Any]:
    judged = [
        *_judged(folder / "plain", WITHOUT_STACKS),
        *_judged(folder / "stacks", WITH_STACKS, "--stacks"),
    ]
    right = [row for row in judged if row["verdict"] == row["expected"]]
    faulty = [row for row in judged if row["expected"] != "healthy"]
    return {
        "traces": len(judged),
        "right": len(right),
        "right_ratio": round(len(right) / len(judged), 4),
        "called_healthy_wrongly": sum(row["verdict"] == "healthy" for row in faulty),
        "healthy_missed": sum(
            row["verdict"] != "healthy" for row in judged if row["expected"] == "healthy"
        ),
        "wrong": [row for row in judged if row not in right],
        "by_fault": _by_fault(judged),
        "limits": {"right_ratio": "0.90 and more", "called_healthy_wrongly": 0},
    }


def _judged(folder: Path, expected: dict[str, str], *options: str) -> Iterator[dict[str, Any]]:
    for fault, kind in expected.items():
        if len(list(folder.glob(f"{fault}-*"))) < REPETITIONS * len(MODELS):
            print(f"recording {folder.name} {fault} …", file=sys.stderr, flush=True)
            _record(folder, fault, *options)
        for path in sorted(folder.glob(f"{fault}-*")):
            found = diagnose([path])
            yield {
                "trace": f"{folder.name}/{path.name}",
                "expected": kind,
                "verdict": found.verdict,
                "findings": {f.kind: round(f.share, 3) for f in found.findings},
            }


def _record(folder: Path, fault: str, *options: str) -> None:
    command = [sys.executable, str(PROGRAM), str(folder), "--faults", fault]
    command += ["--models", *MODELS, "--repetitions", str(REPETITIONS), *options]
    # The profiler itself writes to both streams.
    subprocess.run(command, check=True, capture_output=True)


def _by_fault(judged: list[dict[str, Any]]) -> dict[str, str]:
    found: dict[str, list[bool]] = {}
    for row in judged:
        fault = row["trace"].partition("-")[0]
        found.setdefault(fault, []).append(row["verdict"] == row["expected"])
    return {fault: f"{sum(hits)} of {len(hits)}" for fault, hits in found.items()}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1])), indent=1))
