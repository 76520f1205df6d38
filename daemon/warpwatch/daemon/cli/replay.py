"""`warpwatch replay`: the daemon's detectors over a telemetry log, in event time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warpwatch.daemon import config as configuration
from warpwatch.daemon.cli import parsing
from warpwatch.daemon.config_reading import parse_value
from warpwatch.daemon.detection import anomaly_to_json
from warpwatch.daemon.errors import UsageError
from warpwatch.daemon.replay import replay


def main(argv: Sequence[str]) -> int:
    command = parsing.parser(
        "replay",
        "Run the detectors over a telemetry log (the jsonl exporter's file) in event time.\n"
        "Exit 1 when anomalies were found.",
        "warpwatch replay run.jsonl --set detectors.straggler.min_ratio=1.3",
    )
    command.add_argument("log", type=Path, help="a telemetry log; - for standard input")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="a configuration key, such as detectors.hang.timeout_s=60",
    )
    parsing.add_config(command)
    parsing.add_json(command)
    arguments = command.parse_args(argv)
    config = _configured(arguments.config, arguments.settings)
    found = 0
    try:
        with _open(arguments.log) as lines:
            for anomaly in replay(lines, config):
                found += 1
                print(_line(anomaly, arguments.json), flush=True)
    except OSError as error:
        raise UsageError(f"{arguments.log}: {error.strerror}") from error
    return 1 if found else 0


def _line(anomaly: Any, as_json: bool) -> str:
    if as_json:
        return json.dumps(anomaly_to_json(anomaly))
    where = f"{anomaly.job or anomaly.device} step {anomaly.step}"
    return f"{anomaly.time:.3f} {anomaly.severity} {anomaly.kind} {where}: {anomaly.summary}"


def _open(path: Path) -> Any:
    return sys.stdin if str(path) == "-" else path.open(encoding="utf-8", errors="replace")


def _configured(path: Path | None, settings: list[str]) -> configuration.Config:
    tree = configuration.as_tree(configuration.load(path))
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
    return configuration.parse(tree, "--set")
