"""Results of functions and small classes of the exporters, as a golden file of expressions."""

from tests import expressions
from tests.answers import answered, limits, raised
from tests.conftest import Cases
from tests.exporters import states

MODULES = {
    "": "builtins logging threading",
    "opentelemetry.sdk": "resources",
    "prometheus_client": "core",
    "warpwatch_exporters": "collector config events jsonl otlp prometheus push series webhooks",
    "warpwatch_runtime": "agent_metrics http_requests",
    "warpwatch_telemetry": "anomalies captures records samples state",
}


def test_each_expression_has_its_golden_value(cases: Cases) -> None:
    more = vars(states) | {"answered": answered, "limits": limits, "raised": raised}
    expressions.check(cases, "exporters/functions.txt", MODULES, more)
