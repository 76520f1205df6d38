"""`warpwatch config`: check a file, or show what would be in force."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from warpwatch_daemon import config as configuration
from warpwatch_daemon.cli import parsing
from warpwatch_telemetry.errors import UsageError


def main(argv: Sequence[str]) -> int:
    command = parsing.parser(
        "config",
        "check FILE: exit 1 and one line when the file is wrong.\n"
        "show [FILE]: the configuration in force, with the environment on top.",
        "warpwatch config check /etc/warpwatch/warpwatch.yaml",
    )
    command.add_argument("action", choices=["check", "show"])
    command.add_argument("file", nargs="?", type=Path)
    parsing.add_json(command)
    arguments = command.parse_args(argv)
    if arguments.action == "check":
        return _check(arguments.file, arguments.json)
    named = os.environ.get("WARPWATCH_CONFIG")
    file = arguments.file or (Path(named) if named else None)
    tree = configuration.as_tree(configuration.load(file))
    print(json.dumps(tree, indent=1) if arguments.json else yaml.safe_dump(tree, sort_keys=False))
    return 0


def _check(file: Path | None, as_json: bool) -> int:
    if file is None:
        raise UsageError("config check needs a FILE")
    if not file.exists():
        raise UsageError(f"{file}: there is no such file")
    try:
        configuration.load(file)
    except UsageError as error:
        print(json.dumps({"valid": False, "error": str(error)}) if as_json else str(error))
        return 1
    print(json.dumps({"valid": True}) if as_json else f"{file}: valid")
    return 0
