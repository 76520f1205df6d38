"""``make frontier``: what a budget of false alarms finds, and what it raises in health.

Replays the evaluation folder's (WARPWATCH_EVALUATION) real runs with slowdowns added, simulated
shifts, and healthy runs drawn in blocks from the real ones, under several budgets. Keeps the
figures in ``results/frontier.json`` and draws PLOT. Exit 2: there is no evaluation folder.
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

from benchmarks.judge import ROOT, evaluation_script
from benchmarks.processes import CannotMeasure
from warpwatch_daemon.cli.replay import LogReader, read_lines
from warpwatch_detection.config import DetectionConfig
from warpwatch_detection.replay import LogReplay
from warpwatch_telemetry.records import Record

RESULTS = Path(__file__).with_name("results") / "frontier.json"
PLOT = ROOT / "docs/images/frontier.svg"
BUDGETS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
SEED = 500
SIMULATED = 8
HEALTHY = PLACEMENTS = 3
# Blocks are longer than the longest window with its reference; each has the run's own level.
BLOCK, STEPS, HEAD = 400, 3500, 30
INJECTED = (("shift", 0.05), ("shift", 0.10), ("ramp", 0.10))
NAMES = {
    "real shift5%": "#1f77b4",
    "real shift10%": "#2ca02c",
    "real ramp10%": "#9467bd",
    "simulated shift5%": "#ff7f0e",
}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 300, 50, 20, 40


def main() -> int:
    try:
        measured = measure(evaluation(evaluation_script()))
    except CannotMeasure as error:
        print(f"frontier: {error}", file=sys.stderr)
        return 2
    RESULTS.write_text(json.dumps(measured, indent=1) + "\n")
    PLOT.parent.mkdir(exist_ok=True)
    PLOT.write_text(drawn(measured))
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
    """A run of blocks of a healthy one."""
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
    """By budget: runs and those found of each kind, and false alarms in hours of health."""
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


def drawn(measured: dict[str, Any]) -> str:
    """Shares of faults found, from 0.5 to 1, over the budget; false alarms a day below it."""
    across, down = (WIDTH - LEFT - 150) / (len(BUDGETS) - 1), HEIGHT - TOP - BOTTOM

    def at(place: int, recall: float) -> str:
        return f"{LEFT + place * across:.0f},{TOP + (1 - max(recall, 0.5)) / 0.5 * down:.0f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for recall in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        (x, y), (end, _) = at(0, recall).split(","), at(len(BUDGETS) - 1, recall).split(",")
        lines.append(f'<line x1="{x}" x2="{end}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 28}" y="{y}">{recall:.1f}</text>')
    for place, (budget, rows) in enumerate(measured.items()):
        x, health = at(place, 1).split(",")[0], rows["healthy"]
        a_day = 24 * health["false"] / health["hours"]
        lines.append(f'<text x="{x}" y="{HEIGHT - 24}" text-anchor="middle">{budget}</text>')
        lines.append(f'<text x="{x}" y="{HEIGHT - 8}" text-anchor="middle">{a_day:.1f}</text>')
    right = LEFT + (len(BUDGETS) - 1) * across + 30
    lines.append(f'<text x="{right:.0f}" y="{HEIGHT - 24}">budget a job-day</text>')
    lines.append(f'<text x="{right:.0f}" y="{HEIGHT - 8}">raised in health</text>')
    for number, (name, colour) in enumerate(NAMES.items()):
        shares = [rows[name]["found"] / rows[name]["runs"] for rows in measured.values()]
        points = " ".join(at(place, share) for place, share in enumerate(shares))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        row = TOP + 20 + 20 * number
        lines.append(f'<text x="{right:.0f}" y="{row}" fill="{colour}">{name}</text>')
    return "\n".join((*lines, "</svg>", ""))


if __name__ == "__main__":
    sys.exit(main())
