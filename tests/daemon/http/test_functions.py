"""Results of functions of the page and the API, as a golden file."""

from dataclasses import replace
from functools import partial
from typing import Any

from tests import expressions
from tests.conftest import Cases
from tests.daemon.http.conftest import CAPTURE, NOW, STRAGGLER, node_in_trouble
from tests.fleet.shown import fleet_state, node, with_nodes
from warpwatch_telemetry.jobs import RunSummary

MODULES = {
    "": "asyncio errno itertools json",
    "warpwatch_telemetry": "anomalies captures samples state",
    "warpwatch_detection": "detector",
    "warpwatch_detection.anomalies": "tracked",
    "warpwatch_runtime": "agent_metrics quantities",
    "warpwatch_serving": "access answers api backend bodies config connection routes server "
    "web_config",
    "warpwatch_serving.page": "captures charts devices endpoint findings jobs runs",
}


def test_functions_return_the_golden_values(cases: Cases) -> None:
    here = node_in_trouble()
    known: dict[str, Any] = {"anomaly": STRAGGLER, "capture": CAPTURE, "request": CAPTURE.request}
    known |= {"state": here, "rank": here.ranks[0], "job": here.jobs[0], "gpu": here.devices[0]}
    known = {name: partial(replace, part) for name, part in known.items()}
    known |= {one.__name__: one for one in (fleet_state, node, with_nodes)}
    known["run"] = partial(RunSummary, "uid/1000", "llama", time=NOW, first_time=NOW - 3600)
    expressions.check(cases, "http/functions.txt", MODULES, {**known, "NOW": NOW, "here": here})
