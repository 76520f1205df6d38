"""`warpwatch config`: check the configuration, show it, or print its schema."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import yaml

from warpwatch_daemon.cli import GROUP
from warpwatch_daemon.config import Config
from warpwatch_runtime import command_line, loading
from warpwatch_runtime.command_line import say
from warpwatch_telemetry.errors import UsageError


def main(argv: Sequence[str]) -> int:
    command = command_line.parser(
        "config",
        "check FILE: exit 1 and a line for each mistake when the file is wrong.\n"
        "show [FILE]: the configuration in force, with the environment on top; with --all\n"
        "also the built-in recipes of captures.\n"
        "schema: JSON Schema of the file, for editors.",
        "warpwatch config check /etc/warpwatch/warpwatch.yaml",
    )
    command.add_argument("action", choices=["check", "show", "schema"])
    command.add_argument("file", nargs="?", type=Path)
    command.add_argument("--all", action="store_true", help="with show: the built-in recipes too")
    command_line.add_json(command)
    arguments = command.parse_intermixed_args(argv)
    if arguments.action == "check":
        return _check(arguments.file, arguments.json)
    if arguments.action == "schema":
        say(json.dumps(schema(), indent=1))
        return 0
    named = os.environ.get("WARPWATCH_CONFIG")
    file = arguments.file or (Path(named) if named else None)
    tree = loading.as_tree(loading.load(Config, file))
    if not arguments.all:
        built_in = loading.as_tree(Config())["triggers"]["recipes"]
        recipes = tree["triggers"]["recipes"].items()
        tree["triggers"]["recipes"] = {k: v for k, v in recipes if v != built_in.get(k)}
    say(json.dumps(tree, indent=1) if arguments.json else yaml.safe_dump(tree, sort_keys=False))
    return 0


def _check(file: Path | None, as_json: bool) -> int:
    if file is None:
        raise UsageError("config check needs a FILE")
    if not file.exists():
        raise UsageError(f"{file}: there is no such file")
    lines = _mistakes(partial(loading.load, Config), file)
    with suppress(UsageError):
        if loading.read_tree(file).get("fleet"):
            # A package above this one reads the section.
            (fleet,) = metadata.entry_points(group=GROUP, name="fleet")
            lines |= _mistakes(import_module(fleet.module).check_file, file)
    if lines:
        errors = list(lines)
        say(json.dumps({"valid": False, "errors": errors}) if as_json else "\n".join(errors))
        return 1
    absent = "".join(f"; not readable here: {one}" for one in _absent(file))
    say(json.dumps({"valid": True}) if as_json else f"{file}: valid{absent}")
    return 0


def _absent(file: Path) -> Iterator[str]:
    """Yield the files of the server that cannot be read; the daemon may run on another machine."""
    http = loading.load(Config, file).http
    for key, path in (("token_file", http.token_file), ("web_config", http.web_config)):
        if path is not None and not os.access(path, os.R_OK):
            yield f"http.{key} {path}"


def _mistakes(check: Callable[[Path], object], file: Path) -> dict[str, None]:
    """Return a line for each mistake, in order."""
    try:
        check(file)
    except UsageError as error:
        return dict.fromkeys(getattr(error, "lines", [str(error)]))
    return {}


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the configuration file."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **Config.model_json_schema()}
