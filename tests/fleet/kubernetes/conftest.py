"""Each test with ``server`` runs against a stand-in, and in acceptance against a real API server.

The real one is where WARPWATCH_TEST_APISERVER names kube-apiserver of Kubernetes 1.20 or newer, and
etcd is installed. There the fleet has the rights that the chart gives to its service account.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.kubernetes.api_server import ApiServer
from tests.fleet.kubernetes.real import RealApiServer
from tests.fleet.kubernetes.stand_in import StandIn
from tests.fleet.kubernetes.webhook import Served
from tests.helm import chart
from tests.helm.conftest import helm4

__all__ = ["helm4"]

# Read here: every test runs without the variables of the project.
BINARY = os.environ.get("WARPWATCH_TEST_APISERVER", "")


@pytest.fixture(scope="session")
def real(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[RealApiServer]:
    if not BINARY:
        pytest.skip("WARPWATCH_TEST_APISERVER is not set")
    running = RealApiServer(Path(BINARY), tmp_path_factory.mktemp("api"))
    try:
        running.install(request.getfixturevalue("objects"))
        yield running
    finally:
        running.close()


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    running = StandIn(tmp_path_factory.mktemp("api"))
    yield running
    running.close()


@pytest.fixture(params=["played", pytest.param("real", marks=pytest.mark.deploy)])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ApiServer:
    found: ApiServer = request.getfixturevalue(request.param)
    return found.begin(monkeypatch)


@pytest.fixture
def stand_in(played: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A stand-in, for failures that a real server does not produce on request."""
    played.begin(monkeypatch)
    return played


@pytest.fixture(scope="session")
def objects(helm4: Path) -> tuple[chart.Object, ...]:
    return chart.scenario(helm4, "fleet-kubernetes-values.yaml")


@pytest.fixture(scope="session")
def parts(objects: tuple[chart.Object, ...]) -> str:
    """As the chart gives them to the fleet."""
    maps = chart.of_kind(objects, "ConfigMap")
    return str(next(one["data"]["pod.yaml"] for one in maps if "pod.yaml" in one["data"]))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, parts: str) -> Iterator[Served]:
    running = Served(tmp_path_factory.mktemp("webhook"), parts)
    yield running
    running.close()
