"""What a fleet says of captures over HTTP, and that nobody else may."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.daemon.http.alert_node import WEBHOOK, notification
from tests.daemon.http.conftest import CAPTURE, socket_of
from tests.loop.other_users import STRANGER, request
from warpwatch_daemon.http.server import Server
from warpwatch_telemetry.captures import AnomalySeen

CAPTURES = "/api/v1/captures"
CANCEL = f"{CAPTURES}/{CAPTURE.id}/cancel"
ASK: dict[str, Any] = {"job": "llama-7b", "owner": "uid/1000", "run": "r1"}
NAME = "20261122T201500-0a1b2c"


def test_a_fleet_names_the_capture_its_start_step_and_its_anomaly(client: Any, agent: Any) -> None:
    about = {"id": f"{NAME}-2", "start_step": 40, "anomaly_id": "a7", "anomaly_kind": "straggler"}
    about |= {"anomaly_seen": {"rank": 3, "begin_step": 12, "ratio": 1.6}}
    answer = client.post(CAPTURES, json=ASK | about)
    assert answer.status_code == 202
    assert (answer.json()["id"], answer.json()["start_step"]) == (f"{NAME}-2", 40)
    (asked,) = agent.asked
    assert asked.job_id == ("uid/1000", "llama-7b", "r1")
    assert (asked.trigger, asked.anomaly_id, asked.anomaly_kind) == ("anomaly", "a7", "straggler")
    assert asked.anomaly_seen == AnomalySeen(3, 12, 1.6)


def test_what_would_be_captured_and_an_end(client: Any) -> None:
    prepared = client.post(f"{CAPTURES}/prepare", json=ASK | {"ranks": [0, 1]})
    assert prepared.json() == {"ranks": [0, 1], "steps": 5, "begun": 412, "step_s": 0.212}
    ended = client.post(CANCEL)
    assert (ended.status_code, ended.json()["id"]) == (200, CAPTURE.id)
    assert client.post(f"{CAPTURES}/none/cancel").status_code == 404


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_may_capture_but_not_speak_for_a_fleet(
    client: Any, agent: Any, shared_server: Server
) -> None:
    fleets: list[dict[str, Any]] = [{"id": NAME}, {"start_step": 40}, {"anomaly_seen": {"rank": 1}}]
    fleets += [{"anomaly_id": "a", "anomaly_kind": "hang"}]
    asked = [(CAPTURES, ASK | about, "not_yours") for about in fleets]
    asked += [(f"{CAPTURES}/prepare", ASK, "not_yours"), (CANCEL, ASK, "not_yours")]
    asked += [(WEBHOOK, notification(), "not_root")]
    for path, body, reason in asked:
        status, text = request(STRANGER, socket_of(shared_server), path, body)
        assert (status, json.loads(text)["error"]["reason"]) == (403, reason), path
    assert agent.asked == []
