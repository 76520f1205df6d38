"""Results of functions and small classes of captures, as a golden file."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from tests import expressions
from tests.capturing.played import Counted
from tests.conftest import Cases
from tests.daemon.http.conftest import CAPTURE, STRAGGLER, node_in_trouble
from warpwatch_capturing.alerts import AlertRequests

MODULES = {
    "": "itertools json",
    "warpwatch_runtime": "agent_metrics",
    "warpwatch_telemetry": "alerts anomalies captures records samples state",
    "warpwatch_diagnosis.trace": "reader",
    "warpwatch_capturing": "alerts child config confinement cost finisher participant policy "
    "register regular remote_store session store triggers verification",
}
# 2026-09-21 23:30:00 UTC.
LATE_S = 1790033400.0


def test_functions_return_the_golden_values(cases: Cases) -> None:
    here = node_in_trouble()
    known: dict[str, Any] = {"anomaly": STRAGGLER, "capture": CAPTURE, "request": CAPTURE.request}
    known |= {"state": here, "rank": here.ranks[0], "gpu": here.devices[0]}
    known = {name: partial(replace, part) for name, part in known.items()}
    known |= {"LATE_S": LATE_S, "STRAGGLER": STRAGGLER}
    expressions.check(cases, "capturing/functions.txt", MODULES, known)


def test_webhooks_are_received_one_after_the_other() -> None:
    register: Any = SimpleNamespace(all=tuple)
    requests: Any = AlertRequests(
        node_in_trouble, lambda asked: CAPTURE, register, dict, lambda job: {}
    )
    requests._lock = lock = Counted(requests._lock)
    assert (requests.receive([]), lock.times) == ([], 1)
