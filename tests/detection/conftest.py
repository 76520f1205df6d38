"""All that an engine reports, as a golden file of each case of a test."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest

from tests.detection.streams import EPOCH_S
from warpwatch_detection.engine import Detection

Reported = Callable[..., None]


@pytest.fixture
def golden_report(golden_case: Callable[..., None]) -> Reported:
    """Compare all anomalies, and how each detector sees its jobs and devices, with a file."""

    def compare(engine: Detection, *name: str) -> None:
        lines = [_line("anomaly", one) for one in (*engine.history, *engine.active)]
        for kind, statuses in engine.statuses().items():
            lines += [_line(kind, status) for status in statuses]
        golden_case("".join(lines), *name)

    return compare


def _line(name: str, value: object) -> str:
    fields = json.loads(msgspec.json.encode(value), parse_float=_rounded)
    said = (f"{key}={field}" for key, field in fields.items() if field not in (None, "", [], False))
    return " ".join([name, *said]) + "\n"


def _rounded(text: str) -> str:
    """Four digits; a time counts from the start of the stream."""
    number = float(text)
    return f"{round(number - EPOCH_S if number > 1e9 else number, 6):.4g}"
