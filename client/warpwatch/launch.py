"""``python -m warpwatch run -- python train.py``: a program that is observed, unchanged."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

PROGRAM = "python -m warpwatch run"
HELP = """usage: {program} [--job NAME] -- COMMAND [ARGUMENT ...]

Runs COMMAND with the shim: its steps, what they spend their time on, and its memory are reported
to the daemon of this node. COMMAND takes the place of this process, so status and signals are its
own.

  --job NAME  name of the training run (otherwise WARPWATCH_JOB, Slurm's, torchrun's, the
              script's)

example: {program} --job llama-7b -- torchrun --nproc-per-node 8 train.py
"""
BOOTSTRAP = Path(__file__).resolve().parent / "bootstrap"


class BadArguments(ValueError):
    """Arguments that cannot be run; the text says what to do."""


def parse(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command, and variables for its environment. Raises BadArguments."""
    variables: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        option, _, value = rest.pop(0).partition("=")
        if option == "--":
            break
        if option != "--job":
            raise BadArguments(f"unknown option {option}, there is only --job NAME")
        if not value and rest:
            value = rest.pop(0)
        if not value or value == "--":
            raise BadArguments(f"{option} needs a name")
        variables["WARPWATCH_JOB"] = value
    if not rest:
        raise BadArguments("no command to run, give it after --: -- python train.py")
    return rest, variables


def environment(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child with the shim. With WARPWATCH=0 it stays switched off."""
    child = {**environ, **variables}
    if environ.get("WARPWATCH") == "0":
        return child
    path = child.get("PYTHONPATH")
    child["PYTHONPATH"] = f"{BOOTSTRAP}{os.pathsep}{path}" if path else str(BOOTSTRAP)
    child["WARPWATCH"] = "1"
    return child


def main(arguments: Sequence[str], prog: str = PROGRAM) -> int:
    """Replace this process with the command; if that fails, return 2 and print one line."""
    if list(arguments[:1]) in (["--help"], ["-h"]):
        sys.stdout.write(HELP.format(program=prog))
        return 0
    try:
        command, variables = parse(arguments)
        _execute(command, environment(variables, os.environ))
    except BadArguments as error:
        sys.stderr.write(f"{prog}: {error}\n")
    except OSError as error:
        sys.stderr.write(f"{prog}: {command[0]}: {error.strerror}\n")
    return 2


def _execute(command: list[str], environ: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these two, and what is ignored stays so over exec: the command starts as from
    # a shell.
    ignored = {number: signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGXFSZ)}
    try:
        for number in ignored:
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], command, environ)
    except OSError:
        for number, handler in ignored.items():
            signal.signal(number, handler)
        raise
