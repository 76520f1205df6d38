"""What functions and small classes of the detection return, as a golden file."""

from tests import expressions
from tests.conftest import Cases

MODULES = {
    "": "math",
    "warpwatch_detection": "config detector ranks runs",
    "warpwatch_detection.anomalies": "snapshot",
    "warpwatch_detection.detectors": "deaths memory run_regression",
    "warpwatch_detection.detectors.devices": "errors",
    "warpwatch_detection.detectors.serving": "latency_regression",
    "warpwatch_detection.signals": "baselines level_shift memory_growth peers rank_levels samples",
    "warpwatch_telemetry": "jobs records",
}


def test_functions_return_the_golden_values(cases: Cases) -> None:
    expressions.check(cases, "detection/functions.txt", MODULES, {})
