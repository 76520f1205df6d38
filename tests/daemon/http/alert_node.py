"""A node that is sent alerts: a real service behind a real server, ranks by hand."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.daemon.captures.capture_node import CaptureNode
from tests.daemon.http.conftest import MemoryAgent
from tests.daemon.state.counted import counted
from tests.manual_clock import ManualClock
from warpwatch_capturing.alerts import AlertRequests
from warpwatch_daemon.state.hub import Hub
from warpwatch_telemetry.alerts import Alert, AlertAnswer
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.state import State

_SENT = json.loads(Path(__file__).with_name("alerts.json").read_bytes())
BEGAN = _SENT["alert"]["startsAt"]
WEBHOOK = "/api/v1/alertmanager"


class AlertNode(MemoryAgent):
    """Ranks 0 to 3 of job ``train`` run here, each on the device ``GPU-<rank>``."""

    def begin(self, path: Path, stack: ExitStack, **triggers: Any) -> None:
        """From nothing, though a server that knows this object runs on."""
        self.reset(path)
        self.clock = ManualClock()
        self.node = CaptureNode(path, stack, ranks=(0, 1, 2, 3), **triggers)
        self._open()

    def _open(self) -> None:
        self.metrics = self.node.hub.metrics
        self.node.hub.follow_ranks(self.node.source.devices(self.node.at))
        self.requests = self.open_requests()

    def open_requests(self, hub: Hub | None = None) -> AlertRequests:
        """``hub``: the hub that knows the ranks, if it is not the node's."""
        known = hub or self.node.hub
        service = self.node.service
        return AlertRequests(
            lambda: known.state() if known.ranks_known() else None,
            service.request,
            service.register,
            lambda: service.policy.config.recipes,
            self.node.source.targets,
            "node-17",
            self.clock.wall,
        )

    def restart(self) -> None:
        """As a daemon's start does it: what is known comes from the store."""
        self.node.restart()
        self._open()

    def state(self) -> State:
        return self.node.hub.state()

    overview = state

    def receive_alerts(self, alerts: Sequence[Alert], own_name: str) -> list[AlertAnswer]:
        return self.requests.receive(alerts, own_name)

    def captures(self) -> list[Capture]:
        return list(self.state().captures)

    def counted(self, outcome: str) -> float:
        return counted(self.node.hub, "alerts_received_total", outcome) or 0.0


def alert(fingerprint: str = "f1", **labels: str) -> dict[str, Any]:
    own = _SENT["alert"]
    return {**own, "labels": own["labels"] | labels, "fingerprint": fingerprint}


def notification(*alerts: dict[str, Any]) -> dict[str, Any]:
    return {**_SENT["notification"], "alerts": list(alerts)}


def send(client: httpx.Client, *alerts: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.post(WEBHOOK, json=notification(*alerts))
    assert answer.status_code == 200, answer.text
    answers: list[dict[str, Any]] = answer.json()["alerts"]
    return answers
