"""`warpwatch metrics`: list every exported metric."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from warpwatch_runtime import command_line
from warpwatch_runtime.command_line import say
from warpwatch_telemetry.catalogue import CATALOGUE


def main(argv: Sequence[str]) -> int:
    command = command_line.parser(
        "metrics", "List every metric that can be exported.", "warpwatch metrics nvlink"
    )
    command.add_argument("pattern", nargs="?", default="", help="only names that contain this")
    command_line.add_json(command)
    arguments = command.parse_args(argv)
    rows = [row for row in CATALOGUE.values() if arguments.pattern in row.full_name]
    if arguments.json:
        say(json.dumps([asdict(row) | {"name": row.full_name} for row in rows], indent=1))
        return 0
    for row in rows:
        labels = f"{{{','.join(row.all_labels)}}}" if row.all_labels else ""
        say(f"{row.full_name}{labels}\n    {row.kind}: {row.help}")
    return 0
