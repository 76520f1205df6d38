"""What functions and small classes of the detection return, as a golden file."""

from tests import expressions
from tests.conftest import Cases

MODULES = {
    "": "math",
    "warpwatch_detection": "detector runs",
    "warpwatch_detection.signals": "baselines level_shift memory_growth peers",
    "warpwatch_telemetry": "jobs",
}


def test_functions_return_the_golden_values(cases: Cases) -> None:
    expressions.check(cases, "detection/functions.txt", MODULES, {})
