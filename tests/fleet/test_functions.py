"""Results of functions and small classes of a fleet, as a golden file."""

import importlib
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

from tests import expressions
from tests.conftest import Cases
from tests.daemon.http.conftest import CAPTURE
from tests.fleet.kubernetes.told import fault
from tests.fleet.nodes import NOW, TestCluster, end, seen, step
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_fleet.agent_link import AgentError
from warpwatch_fleet.bus import fleet as workers
from warpwatch_fleet.jobs import FleetJob
from warpwatch_fleet.kubernetes.api import KubernetesError
from warpwatch_runtime.bus import BusError
from warpwatch_telemetry.errors import Refused

MODULES = {
    "": "asyncio contextlib httpx itertools json",
    "warpwatch_fleet": "agent_link cluster config fleet jobs memory merging node runs source "
    "targets",
    "warpwatch_fleet.bus": "partition sharing streams worker",
    "warpwatch_fleet.captures": "remote_agents requests",
    "warpwatch_fleet.page": "heatmap nodes",
    "warpwatch_fleet.kubernetes": "api captures conditions events injection tasks",
    "warpwatch_telemetry": "bus_messages records samples state",
}
LLAMA = seen(0).job_id
# The times and limits of each module, before a test patches them.
LIMITS = {
    one: {name: value for name, value in vars(module).items() if isinstance(value, int | float)}
    for package in [*MODULES][1:-1]
    for one in MODULES[package].split()
    for module in [importlib.import_module(f"{package}.{one}")]
}


def tried(work: Any, *about: Any) -> object:
    try:
        return work(*about)
    except (AgentError, BusError, KubernetesError, Refused) as error:
        return f"{type(error).__name__}{vars(error) or ''}: {error}"


def test_functions_return_the_golden_values(cases: Cases) -> None:
    known: dict[str, Any] = {"NOW": NOW, "capture": CAPTURE, "workers": workers, "tried": tried}
    known["job"] = partial(FleetJob, LLAMA, seen(0), DetectionConfig(), AnomaliesConfig())
    known |= {"LIMITS": LIMITS, "LLAMA": LLAMA, "patch": patch, "free": nullcontext()}
    known |= {one.__name__: one for one in (AsyncMock, Mock, TestCluster, end, fault, seen, step)}
    expressions.check(cases, "fleet/functions.txt", MODULES, known)
