"""`warpwatch status`: what a running daemon sees."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from warpwatch_daemon.cli import parsing
from warpwatch_runtime import command_line
from warpwatch_runtime.quantities import (
    ago,
    no_step,
    percent,
    places,
    rate,
    seconds,
    tokens_per_joule,
    uncounted,
)

# Who comes because of an alert may come when all is over.
MAX_ENDED = 5
PARTS = ("devices", "jobs", "ranks", "anomalies", "captures")


def main(argv: Sequence[str], wall: Callable[[], float] = time.time) -> int:
    command = command_line.parser(
        "status",
        "Devices, ranks, anomalies and captures of a running daemon. Exit 1 when an anomaly is "
        "active that is more than information.",
        "warpwatch status --url http://127.0.0.1:9400",
    )
    parsing.add_daemon(command)
    command_line.add_json(command)
    arguments = command.parse_args(argv)
    api = parsing.api(arguments)
    status: dict[str, Any] = {part: api.get(f"/api/v1/{part}")[part] for part in PARTS}
    status["blind"] = [
        {"kind": detector["kind"], **reading}
        for detector in api.get("/api/v1/detectors")["detectors"]
        for reading in detector["readings"]
        if reading["blind"]
    ]
    active = [anomaly for anomaly in status["anomalies"] if anomaly["end_time"] is None]
    serious = [anomaly for anomaly in active if anomaly["severity"] != "info"]
    if arguments.json:
        print(json.dumps(status, indent=1))
    else:
        print("\n".join(_lines(status, active, wall())))
    return 1 if serious else 0


def _lines(status: dict[str, Any], active: list[Any], now: float) -> Iterator[str]:
    up = sum(1 for device in status["devices"] if device["up"])
    yield f"{up} of {len(status['devices'])} devices up, {len(status['ranks'])} ranks"
    several = len({rank["owner"] for rank in status["ranks"]}) > 1
    for rank in status["ranks"]:
        whose = f" of {rank['owner']}" if several else ""
        yield f"  {rank['job']} rank {rank['rank']}{whose}: {', '.join(_rank(rank))}"
    for job in status["jobs"]:
        for method, ratio in job.get("model_flops_ratio", {}).items():
            yield f"  {job['name']}: MFU {percent(ratio)} (by {method})"
        if memory := job.get("memory_ratio"):
            yield f"  {job['name']}: tensors take up to {percent(memory)} of a GPU's memory"
        if per_joule := job.get("tokens_per_joule"):
            yield f"  {job['name']}: {tokens_per_joule(per_joule)}"
    for one in status["blind"]:
        yield f"  {one['kind']} of {one['job']} is blind to what it is to find: {one['text']}"
    ended = [anomaly for anomaly in status["anomalies"] if anomaly["end_time"] is not None]
    for anomaly in (*active, *sorted(ended, key=lambda one: -one["end_time"])[:MAX_ENDED]):
        yield _anomaly(anomaly, now)
    for capture in status["captures"][-5:]:
        diagnosis = capture["diagnosis"] or {}
        without = "the fleet has its verdict" if capture.get("of_fleet") else "no diagnosis"
        verdict = diagnosis.get("verdict", without)
        about = f"{capture['id']} of {capture['request']['job']}"
        copy = f", at {capture['remote']}" if capture["remote"] else ""
        yield f"  capture {about}: {capture['outcome'] or 'running'}, {verdict}{copy}"


def _anomaly(anomaly: dict[str, Any], now: float) -> str:
    """``!``: it is active, and more than information. ``now``: wall clock, seconds."""
    end_time = anomaly["end_time"]
    mark = "!" if end_time is None and anomaly["severity"] != "info" else " "
    when = (
        f"found {ago(anomaly['time'], now)}" if end_time is None else f"over {ago(end_time, now)}"
    )
    # A daemon of the version before has no sentence.
    said = anomaly.get("sentence", anomaly["summary"])
    return f"{mark} {anomaly['kind']}, {when}: {said}"


def _rank(rank: dict[str, Any]) -> Iterator[str]:
    reason = rank["silent_reason"]
    said = reason is None or reason in (rank["status"], "unknown")
    yield rank["status"] if said else f"{rank['status']} ({reason})"
    yield f"step {rank['step']}"
    recent_s = rank["recent_s"]
    if recent_s:
        yield f"median step {seconds(statistics.median(recent_s))}"
    else:
        calls = rank.get("calls_without_step", 0)
        yield no_step(calls) if calls else "no step yet"
    if elsewhere := rank.get("steps_elsewhere", 0):
        yield uncounted(elsewhere)
    if parallel := places(rank.get("parallel", {})):
        yield parallel
    for what in ("steps", "samples", "tokens"):
        if per_s := rank[f"{what}_per_s"]:
            yield rate(per_s, what)
    if rank["step_clock"]:
        yield f"step clock {rank['step_clock']}"
