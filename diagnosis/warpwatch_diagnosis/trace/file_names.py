"""What files of a capture are called; light enough for who only names them."""

from __future__ import annotations

REDUCTION = ".reduction.gz"


def reduction_name(trace: str) -> str:
    """``rank3.pt.trace.json.gz`` becomes ``rank3.reduction.gz``."""
    return trace.partition(".")[0] + REDUCTION
