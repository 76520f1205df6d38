"""`warpwatch runs`: list training runs, or compare two."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from warpwatch_daemon.cli import parsing
from warpwatch_detection.runs import RunComparison, compare
from warpwatch_runtime import command_line
from warpwatch_runtime.command_line import say
from warpwatch_runtime.quantities import rate, seconds, text
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.jobs import RunSummary

# Phases that changed by less than this part of a step are not worth a line.
MIN_CHANGE = 0.005


def main(argv: Sequence[str]) -> int:
    command = _parser()
    arguments = command.parse_intermixed_args(argv)
    if arguments.compare and (len(arguments.compare) != 3 or arguments.compare[0] != "compare"):
        command.error("expected nothing, or: compare BEFORE AFTER")
    answer = parsing.api(arguments).get("/api/v1/runs")
    runs = msgspec.convert(answer["runs"], list[RunSummary], strict=False)
    if not arguments.compare:
        shown = [run for run in runs if arguments.job in (None, run.job)]
        _print(arguments.json, {"runs": list(map(asdict, shown))}, map(_line, shown))
    else:
        before, after = (_find(runs, name) for name in arguments.compare[1:])
        comparison = compare(before, after)
        _print(arguments.json, asdict(comparison), _lines(comparison))
    return 0


def _parser() -> argparse.ArgumentParser:
    command = command_line.parser(
        "runs",
        "What a running daemon keeps of each run of a job: steps, step time, phases, tokens, "
        "energy, anomalies. With `compare`: how much longer a step takes in one than in another, "
        "and which phase grew.",
        "warpwatch runs compare 4711 4712",
    )
    command.add_argument(
        "compare",
        nargs="*",
        metavar="compare BEFORE AFTER",
        help="two runs, as the list names them: RUN or JOB/RUN, also OWNER/JOB/RUN",
    )
    command.add_argument("--job", help="list runs of this job alone")
    parsing.add_daemon(command)
    command_line.add_json(command)
    return command


def _print(as_json: bool, document: dict[str, Any], lines: Iterator[str]) -> None:
    say(json.dumps(document, indent=1) if as_json else "\n".join(lines) or "no run is known")


def _find(runs: Sequence[RunSummary], name: str) -> RunSummary:
    """Return the run of this name. Raises UsageError unless there is exactly one."""
    found = [run for run in runs if name in (run.run, f"{run.job}/{run.run}", _whole(run))]
    if len(found) != 1:
        some = ", ".join(text(_whole(run)) for run in (found or runs)[-8:]) or "none"
        which = "several runs are" if found else "no run is"
        raise UsageError(f"{which} called {name!r}; there are {some}")
    return found[0]


def _whole(run: RunSummary) -> str:
    return f"{run.owner}/{run.job}/{run.run}"


def _line(run: RunSummary) -> str:
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.first_time))
    state = "runs" if run.end_time is None else f"took {seconds(run.end_time - run.first_time)}"
    tokens = f", {rate(run.tokens_per_s, 'tokens')}" if run.tokens_per_s else ""
    raised = ", ".join(f"{kind} {count}" for kind, count in sorted(run.anomalies.items()))
    return (
        f"{text(run.job)}/{text(run.run)}: {began}, {state}, {run.counted_steps}, "
        f"p50 {seconds(run.step_p50_s)}, p95 {seconds(run.step_p95_s)}{tokens}"
        + (f"; {raised}" if raised else "")
    )


def _lines(found: RunComparison) -> Iterator[str]:
    before, after = found.before, found.after
    yield _line(before)
    yield _line(after)
    for difference in found.differs:
        yield f"! {difference.replace('_', ' ')}"
    if found.step_ratio is None:
        yield f"one of them has too few {'iterations' if after.is_server else 'steps'} to compare"
        return
    grown = f", most of it in {found.grown}" if found.grown and found.step_ratio > 1 else ""
    work = " for the same work" if after.is_server else ""
    yield f"{after.a_step} takes {100 * (found.step_ratio - 1):+.1f} %{work}{grown}"
    least_s = MIN_CHANGE * (before.step_p50_s or 0.0)
    for change in (*found.phases, *found.latencies):
        if abs(change.grown_s) >= least_s:
            sign = "+" if change.grown_s > 0 else "\N{MINUS SIGN}"
            spans = f"{seconds(change.before_s)} → {seconds(change.after_s)}"
            name = text(change.phase.replace("_", " "))
            yield f"  {name:<12} {spans} ({sign}{seconds(abs(change.grown_s))})"
