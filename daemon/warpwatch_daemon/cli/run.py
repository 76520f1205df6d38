"""`warpwatch run`: start a training program with the shim."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch import launch


def main(argv: Sequence[str]) -> int:
    return launch.main(list(argv), prog="warpwatch run")
