"""`warpwatch diagnose`: say what a torch.profiler trace shows."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_diagnosis import __main__ as diagnosis


def main(argv: Sequence[str]) -> int:
    return diagnosis.main(list(argv), prog="warpwatch diagnose")
