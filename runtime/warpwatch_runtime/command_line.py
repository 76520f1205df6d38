"""Provides options and output that all commands share."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from warpwatch_runtime.log_output import escaped


def parser(name: str, description: str, example: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        f"warpwatch {name}",
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


def add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config",
        type=Path,
        default=os.environ.get("WARPWATCH_CONFIG") or None,
        metavar="FILE",
        help="YAML file; without it (or WARPWATCH_CONFIG) the defaults hold",
    )


def say(text: str, file: TextIO | None = None) -> None:
    """Print the text for a person. All output of commands goes through here.

    Names of jobs, devices and files come from strangers: control characters are printed as escapes.
    Line breaks stay, so each line of a list must hold at most one stranger's text.
    """
    file = sys.stdout if file is None else file
    safe = "\n".join(escaped(line, None) for line in text.split("\n"))
    encoding = file.encoding or "utf-8"
    file.write(safe.encode(encoding, "replace").decode(encoding) + "\n")
    file.flush()


# A shorter command prints no progress.
PROGRESS_INTERVAL_S = 5.0


class ProgressLines:
    """Prints the progress of a long command on standard error; call ``show`` at any progress."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._shown_at = monotonic()
        self._shown = ""

    def show(self, name: str, done: float, total: float, note: str = "") -> None:
        """Show the progress of ``name``; ``note``: the current work."""
        now = self._monotonic()
        share = f"{min(1.0, done / total):.0%}" if total > 0 else ""
        line = " ".join(filter(None, (f"{name}:", share, note)))
        if now - self._shown_at >= PROGRESS_INTERVAL_S and line != self._shown:
            say(line, sys.stderr)
            self._shown_at, self._shown = now, line
