"""A server of somebody else's, which may take its time."""

from collections.abc import Iterator

import pytest

from tests.exporters.receiver import Receiver, receiver
from warpwatch_exporters import otlp
from warpwatch_runtime import http_requests


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (http_requests, otlp):
        monkeypatch.setattr(module, "TIMEOUT_S", 300.0)


@pytest.fixture
def server() -> Iterator[Receiver]:
    with receiver() as server:
        yield server
