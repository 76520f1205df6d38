"""All that an engine reports, as a golden file of each case of a test."""

from collections.abc import Callable, Iterable

import pytest

from tests.golden_lines import line
from warpwatch_detection.engine import Detection

Reported = Callable[..., None]


@pytest.fixture
def golden_report(golden_case: Callable[..., None]) -> Reported:
    """Compare all anomalies, and how each detector sees its jobs and devices, with a file."""

    def compare(engine: Detection, *name: str, told: Iterable[str] = ()) -> None:
        lines = [line("anomaly", one) for one in (*engine.history, *engine.active)]
        lines += [line("explained", one) for one in engine.suppressed]
        lines += told or statuses_of(engine)
        # The sign of what is nearly nothing differs between mathematical libraries.
        golden_case("".join(lines).replace("-0.0 %", "+0.0 %").replace("=-0 ", "=0 "), *name)

    return compare


def statuses_of(engine: Detection) -> list[str]:
    return [line(kind, one) for kind, some in engine.statuses().items() for one in some]
