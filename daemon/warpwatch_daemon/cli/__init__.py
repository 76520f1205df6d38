"""The command line: one file a command, imported only when it is the one that runs.

Exit status: 0 well, 1 a problem was found, 2 usage or unreadable input, 3 could not be done.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from warpwatch._version import __version__
from warpwatch_telemetry.errors import WarpwatchError

COMMANDS = {
    "daemon": "watch this node: sample, detect, capture, serve",
    "run": "start a training program with the shim",
    "shim": "copy the shim into a folder, for images that are not changed",
    "status": "what a running daemon sees",
    "capture": "ask for a profile of a running job",
    "diagnose": "say what a torch.profiler trace shows",
    "replay": "run the detectors over a telemetry log",
    "doctor": "check what this machine offers and what is missing",
    "demo": "see the whole loop without a GPU",
    "metrics": "list every exported metric",
    "config": "check or show the configuration",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name not in COMMANDS:
        return _without_command(name, arguments)
    module = importlib.import_module(f"warpwatch_daemon.cli.{name}")
    try:
        return int(module.main(rest))
    except WarpwatchError as error:
        print(f"warpwatch {name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _without_command(name: str, arguments: list[str]) -> int:
    listing = "\n".join(f"  {command:<10}{text}" for command, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        "warpwatch",
        description="Watches the GPUs of a node and the training jobs on them, tells when "
        "something goes wrong, and comes back with the reason.",
        epilog=f"commands:\n{listing}\n\nexample:\n  warpwatch demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"warpwatch {__version__}")
    parser.add_argument("command", nargs="?", help="`warpwatch COMMAND --help` says more")
    if name and not name.startswith("-"):
        parser.error(f"no command {name!r}; there are {', '.join(COMMANDS)}")
    parser.parse_args(arguments)
    parser.print_help()
    return 0 if arguments else 2
