"""Results of functions and small classes of the telemetry and the runtime, as a golden file."""

from tests import expressions
from tests.conftest import Cases
from warpwatch_daemon.config import Config

MODULES = {
    "": "io itertools logging",
    "warpwatch_telemetry": "alerts anomalies bus_messages captures catalogue clean_text errors "
    "jobs log newest records samples sections state stream xids",
    "warpwatch_runtime": "agent_metrics bus command_line directory files http_requests loading "
    "log_output supervisor",
}


def test_functions_return_the_golden_values(cases: Cases) -> None:
    expressions.check(cases, "telemetry/functions.txt", MODULES, {"Config": Config})
