"""`warpwatch shim`: copy the shim into a folder, for images that are not changed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from warpwatch import launch
from warpwatch_runtime import command_line
from warpwatch_runtime.command_line import say
from warpwatch_telemetry.errors import UsageError


def main(argv: Sequence[str]) -> int:
    command = command_line.parser(
        "shim",
        "Copy the shim into FOLDER, as an init container does for a training image that is not "
        "changed. Prints the PYTHONPATH with which a program loads it.",
        "warpwatch shim /opt/warpwatch-shim",
    )
    command.add_argument("folder", type=Path, metavar="FOLDER")
    target = command.parse_args(argv).folder / "warpwatch"
    try:
        # Compiled files are of one version of Python; the training's is its own.
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(launch.__file__).parent, target, ignore=ignored, dirs_exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot copy the shim to {target}: {_reason(error)}") from error
    say(str(target / "bootstrap"))
    return 0


def _reason(error: OSError) -> str:
    """Return the first reason; ``copytree`` collects (source, target, reason) of all files."""
    if isinstance(error, shutil.Error) and error.args[0]:
        return str(error.args[0][0][2])
    return str(error.strerror or error)
