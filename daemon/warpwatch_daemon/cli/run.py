"""`warpwatch run`: the client's own launcher, for machines that have both."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch import launch


def main(argv: Sequence[str]) -> int:
    return launch.main(list(argv), prog="warpwatch run")
