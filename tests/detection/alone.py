"""The engine with a few detectors only: what a test is about, and nothing that others find."""

from __future__ import annotations

from typing import Any

from tests.detection.streams import detection
from warpwatch_detection.detectors import DETECTORS
from warpwatch_detection.engine import Detection


def alone(*kinds: str, **sections: Any) -> Detection:
    """The detectors of ``kinds`` with their defaults and what ``sections`` change."""
    others = {kind: {"enabled": False} for kind in DETECTORS.keys() - set(kinds)}
    return detection(**others, **sections)
