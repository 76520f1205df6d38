"""The command line: one file per command, which is imported only to run.

Commands are entry points of the group `warpwatch.commands` (pyproject.toml), so that packages above
this one can add theirs.
Exit status: 0 well, 1 a problem was found, 2 usage or unreadable input, 3 could not be done.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path

from warpwatch_runtime.command_line import say
from warpwatch_telemetry.errors import WarpwatchError

GROUP = "warpwatch.commands"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = metadata.entry_points(group=GROUP)
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name not in commands.names:
        return _without_command(name, arguments, commands)
    try:
        return int(commands[name].load()(rest))
    except WarpwatchError as error:
        say(f"warpwatch {name}: {error}", sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output exited.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _without_command(name: str, arguments: list[str], commands: metadata.EntryPoints) -> int:
    listing = "\n".join(f"  {command.name:<10}{_summary(command)}" for command in commands)
    parser = argparse.ArgumentParser(
        "warpwatch",
        description="Watches the GPUs of a node and the training jobs on them, reports when "
        "something goes wrong, and comes back with the reason.",
        epilog=f"commands:\n{listing}\n\nexample:\n  warpwatch demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = metadata.version("warpwatch")
    parser.add_argument("--version", action="version", version=f"warpwatch {version}")
    parser.add_argument("command", nargs="?", help="`warpwatch COMMAND --help` says more")
    if name and not name.startswith("-"):
        known = ", ".join(sorted(commands.names)) or "none: install warpwatch again"
        parser.error(f"no command {name!r}; there are {known}")
    parser.parse_args(arguments)
    parser.print_help()
    return 0 if arguments else 2


def _summary(command: metadata.EntryPoint) -> str:
    """Return the first line of the module's docstring after the colon, without importing it."""
    spec = util.find_spec(command.module)
    assert spec is not None and spec.origin is not None, f"{command.module} is not installed whole"
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_bytes())) or ""
    return docstring.partition("\n")[0].partition(": ")[2].rstrip(".")
