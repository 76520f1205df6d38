"""What the commands' parsers have in common."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


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
