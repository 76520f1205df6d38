"""What functions of the page and the API return, as a golden file."""

from dataclasses import replace
from functools import partial
from typing import Any

from tests import expressions
from tests.conftest import Cases
from tests.daemon.http.conftest import CAPTURE, NOW, STRAGGLER, node_in_trouble
from tests.fleet.shown import fleet_state, node, with_nodes
from warpwatch_runtime import quantities
from warpwatch_serving import access, api, backend, bodies, config, connection, web_config
from warpwatch_serving.page import captures, charts, devices, endpoint, findings, jobs, runs
from warpwatch_telemetry import anomalies, samples, state
from warpwatch_telemetry import captures as documents
from warpwatch_telemetry.jobs import RunSummary

MODULES = (
    anomalies, documents, samples, state, access, api, backend, bodies, config, connection,
    web_config, captures, charts, devices, endpoint, findings, jobs, runs, quantities,
)  # fmt: skip


def test_functions_return_the_golden_values(cases: Cases) -> None:
    here = node_in_trouble()
    known: dict[str, Any] = {"anomaly": STRAGGLER, "capture": CAPTURE, "request": CAPTURE.request}
    known |= {"state": here, "rank": here.ranks[0], "job": here.jobs[0], "gpu": here.devices[0]}
    known = {name: partial(replace, part) for name, part in known.items()}
    known |= {one.__name__: one for one in (fleet_state, node, with_nodes, replace)}
    known["run"] = partial(RunSummary, "uid/1000", "llama", time=NOW, first_time=NOW - 3600)
    expressions.check(cases, "http/functions.txt", *MODULES, NOW=NOW, here=here, **known)
