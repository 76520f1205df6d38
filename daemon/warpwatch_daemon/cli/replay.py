"""`warpwatch replay`: run the detectors over a telemetry log."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from warpwatch_daemon.cli import explanation
from warpwatch_daemon.cli.log_file import LogReader, read_lines
from warpwatch_daemon.cli.progress import progress
from warpwatch_daemon.config.sections import Config
from warpwatch_detection.budget import SHARES
from warpwatch_detection.replay import LogReplay
from warpwatch_runtime import command_line
from warpwatch_runtime.command_line import say
from warpwatch_runtime.config import loading
from warpwatch_runtime.config.loading import parse_value
from warpwatch_telemetry.anomalies import KINDS, Anomaly
from warpwatch_telemetry.errors import UsageError

# Of a kind and a job: whether it is shown.
Shown = Callable[[str, str | None], bool]


def main(argv: Sequence[str]) -> int:
    arguments = _arguments(argv)
    # A log may name jobs as it likes, also with what no terminal or file can take.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    shown = _filter(arguments.job, arguments.kind)
    config = _configured(arguments.config, arguments.settings)
    replay = LogReplay(config.detection, config.anomalies, explain=arguments.explain)
    reader = LogReader()
    found = 0
    with progress() as bar:
        lines = read_lines(arguments.log, lambda at, size: bar.show(arguments.log.name, at, size))
        for anomaly in replay.run(reader.records(lines), arguments.at):
            if shown(anomaly.kind, anomaly.job):
                found += 1
                say(_line(anomaly, arguments.json))
    if complaint := reader.complaint():
        say(f"warpwatch: {complaint}", sys.stderr)
    if arguments.explain:
        per_job_day = config.detection.false_alarms_per_job_day
        for line in _explanation(replay, shown, arguments.json, per_job_day):
            say(line)
    return 1 if found else 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    command = command_line.parser(
        "replay",
        "Run the detectors over a telemetry log (the jsonl exporter's file, or that packed by\n"
        "gzip) in event time. Exit 1 when anomalies were found.",
        "warpwatch replay run.jsonl --explain --set detection.false_alarms_per_job_day=0.1",
    )
    command.add_argument("log", type=Path, help="a telemetry log; - for standard input")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="a configuration key, such as detection.hang.timeout_s=60",
    )
    command.add_argument(
        "--explain",
        action="store_true",
        help="say besides how each detector saw each job, rank and device: why it fired or not",
    )
    command.add_argument("--job", help="show only this job")
    command.add_argument("--kind", choices=KINDS, metavar="KIND", help="show only this kind")
    command.add_argument(
        "--at",
        type=float,
        metavar="STEP|TIME",
        help="stop before this step, or this time (wall clock, seconds)",
    )
    command_line.add_config(command)
    command_line.add_json(command)
    return command.parse_args(argv)


def _filter(job: str | None, kind: str | None) -> Shown:
    """Of which kind and job something is shown; what belongs to no job, only without ``job``."""

    def shown(its_kind: str, its_job: str | None) -> bool:
        return kind in (None, its_kind) and job in (None, its_job)

    return shown


def _explanation(
    replay: LogReplay, shown: Shown, as_json: bool, per_job_day: float
) -> Iterator[str]:
    suppressed = [one for one in replay.suppressed() if shown(one.kind, one.found.job)]
    statuses = [one for one in replay.statuses() if shown(one[0], one[1].job)]
    judged = {kind for kind, _ in statuses}
    given = {kind: share * per_job_day for kind, share in SHARES.items() if kind in judged}
    if as_json:
        for one in suppressed:
            yield json.dumps(explanation.suppressed_to_json(one))
        for kind, status in statuses:
            yield json.dumps(explanation.status_to_json(kind, status))
        for kind, a_day in given.items():
            yield json.dumps(explanation.budget_to_json(kind, a_day))
        return
    anomalies = [one for one in replay.anomalies.values() if shown(one.kind, one.job)]
    yield from explanation.lines(anomalies, suppressed, statuses)
    yield from explanation.budget_lines(given)


def _line(anomaly: Anomaly, as_json: bool) -> str:
    if as_json:
        return json.dumps(explanation.anomaly_to_json(anomaly))
    where = f"{anomaly.job or anomaly.device} step {anomaly.step}"
    return f"{anomaly.time:.3f} {anomaly.severity} {anomaly.kind} {where}: {anomaly.summary}"


def _configured(path: Path | None, settings: list[str]) -> Config:
    tree = loading.as_tree(loading.load(Config, path))
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator:
            raise UsageError(f"--set {setting!r}: KEY=VALUE is needed")
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise UsageError(f"--set {key}: {parent} is no section")
        node[leaf] = parse_value(text)
    return loading.parse(Config, tree, "--set")
