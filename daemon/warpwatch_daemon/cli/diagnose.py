"""`warpwatch diagnose`: the diagnosis part's own command."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_diagnosis import __main__ as diagnosis


def main(argv: Sequence[str]) -> int:
    return diagnosis.main(list(argv), prog="warpwatch diagnose")
