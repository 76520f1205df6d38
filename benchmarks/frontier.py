"""``make frontier``: recall and false alarms over the budget of false alarms.

Replays runs of the evaluation folder (WARPWATCH_EVALUATION) under several budgets: real runs with
added slowdowns, simulated shifts, and healthy runs drawn in blocks from the real ones. Keeps the
figures in RESULTS and writes them as a table into DOCUMENT. The exit status is 2 without that
folder.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.judge import DOCUMENT, evaluation_script, into_document
from benchmarks.processes import CannotMeasure
from warpwatch_daemon.cli.replay import LogReader, read_lines
from warpwatch_detection.config import DetectionConfig
from warpwatch_detection.replay import LogReplay
from warpwatch_telemetry.records import Record

RESULTS = Path(__file__).with_name("results") / "frontier.json"
BUDGETS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
SEED = 500
SIMULATED = 8
HEALTHY = PLACEMENTS = 3
# Blocks are longer than the longest window with its reference; each keeps the run's level.
BLOCK, STEPS, HEAD = 400, 3500, 30
INJECTED = (("shift", 0.05), ("shift", 0.10), ("ramp", 0.10))


def main() -> int:
    try:
        measured = measure(evaluation(evaluation_script()))
    except CannotMeasure as error:
        print(f"frontier: {error}", file=sys.stderr)
        return 2
    RESULTS.write_text(json.dumps(measured, indent=1) + "\n")
    DOCUMENT.write_text(into_document(DOCUMENT.read_text(), "frontier", table(measured)))
    print(json.dumps(measured, indent=1))
    return 0


def evaluation(script: Path) -> Any:
    spec = importlib.util.spec_from_file_location("evaluation_steps", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(steps: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    table = Path(steps.HERE) / "mlperf_steps_dev.csv.gz"
    with gzip.open(table, "rt") as lines:
        runs = sorted({int(row["run_id"]) for row in csv.DictReader(lines)})
    for run in runs:
        for inject, size in INJECTED:
            for seed in range(PLACEMENTS):
                yield f"real {inject}{size:.0%}", steps.real(run, inject, size, SEED + seed, table)
        whole = steps.real(run, "none", 0, 0, table)
        yield from (("healthy", resampled(steps, whole, run, seed)) for seed in range(HEALTHY))
    for seed in range(SIMULATED):
        yield "simulated shift5%", steps.simulate("shift5", 1000 * SEED + seed)


def resampled(steps: Any, whole: dict[str, Any], run: int, seed: int) -> dict[str, Any]:
    """Draw a new healthy run in blocks from a healthy one."""
    np = steps.np
    body, chance = whole["duration"][HEAD:], np.random.default_rng(7919 * run + seed)
    parts, usual = [whole["duration"][:HEAD]], np.median(body)
    while sum(map(len, parts)) < STEPS:
        begin = int(chance.integers(0, len(body) - BLOCK))
        block = body[begin : begin + BLOCK]
        parts.append(block * usual / np.median(block))
    series = np.concatenate(parts)
    zeros = np.zeros((1, len(series)))
    same = {"wait": zeros, "comm": zeros, "memory": zeros, "gap": np.zeros(len(series))}
    return {**whole, **same, "duration": series}


def measure(steps: Any) -> dict[str, Any]:
    """Return by budget and kind the runs, those found, and false alarms with the hours."""
    result: dict[str, Any] = {f"{budget:g}": {} for budget in BUDGETS}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run.jsonl"
        for name, case in cases(steps):
            steps.write_log(case, log)
            truth = json.loads(log.with_suffix(".jsonl.truth").read_text())
            records = list(LogReader().records(read_lines(log)))
            for budget in BUDGETS:
                score = steps.score(anomalies(records, budget), truth)
                row = result[f"{budget:g}"].setdefault(
                    name, {"runs": 0, "found": 0, "false": 0, "hours": 0.0}
                )
                row["runs"] += 1
                row["found"] += score["found"]
                row["false"] += score["false"]
                row["hours"] = round(row["hours"] + truth["hours"], 2)
    return result


def anomalies(records: list[Record], budget: float) -> list[dict[str, Any]]:
    found = LogReplay(DetectionConfig(false_alarms_per_job_day=budget)).run(records)
    return [{"time": one.time, "kind": one.kind, "rank": one.rank} for one in found]


def table(measured: dict[str, Any]) -> str:
    """Return one row per budget: recall by kind of fault, and the false alarms of healthy runs."""
    kinds = [name for name in next(iter(measured.values())) if name != "healthy"]
    lines = [f"| budget a job-day | {' | '.join(kinds)} | false alarms a day in health |"]
    lines.append("|---" * (len(kinds) + 2) + "|")
    for budget, rows in measured.items():
        recall = (f"{rows[kind]['found'] / rows[kind]['runs']:.2f}" for kind in kinds)
        healthy = rows["healthy"]
        alarms = f"{24 * healthy['false'] / healthy['hours']:.1f}"
        lines.append(f"| {' | '.join((budget, *recall, alarms))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
