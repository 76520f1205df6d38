"""Results of functions and small classes of the exporters, as a golden file of expressions."""

import builtins
import logging
import threading

from opentelemetry.sdk.resources import Resource
from prometheus_client.core import Metric

from tests import expressions
from tests.answers import answered, raised
from tests.conftest import Cases
from tests.exporters import states
from warpwatch_runtime.agent_metrics import AgentMetrics

MODULES = {
    "warpwatch_exporters": "collector config events jsonl otlp prometheus push series webhooks",
    "warpwatch_telemetry": "anomalies captures records samples state",
}


def test_each_expression_has_its_golden_value(cases: Cases) -> None:
    more = {"answered": answered, "raised": raised, "builtins": builtins, "logging": logging}
    more |= {"threading": threading, "AgentMetrics": AgentMetrics, "Resource": Resource}
    more |= {"Metric": Metric} | vars(states)
    expressions.check(cases, "exporters/functions.txt", MODULES, more)
