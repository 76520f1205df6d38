"""A fleet over two nodes with two ranks each, which it captures."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fleet.capturing import PlayedFleet
from tests.waiting import DEADLINE_S
from warpwatch_fleet import agent_link
from warpwatch_fleet.kubernetes import api


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a hang reaches the limits on how long agents and the API server may take."""
    for limit in ("CONNECT_TIMEOUT_S", "SILENCE_S", "ANSWER_S"):
        monkeypatch.setattr(agent_link, limit, DEADLINE_S)
    monkeypatch.setattr(api, "TIMEOUT_S", DEADLINE_S)


@pytest.fixture
def fleet(tmp_path: Path, stack: ExitStack) -> PlayedFleet:
    return PlayedFleet(tmp_path, stack)
