"""Bodies of Alertmanager's webhook, and what their labels may ask for."""

import json
from pathlib import Path

from pydantic import ValidationError

from tests.daemon.http.alert_node import alert, notification
from tests.daemon.http.conftest import node_in_trouble
from tests.fuzz.watch import Target, json_tokens
from warpwatch_capturing.alerts import Settled, ThisNode, targets_of
from warpwatch_runtime.loading import mistakes
from warpwatch_serving.bodies import AlertmanagerPayload

NODE = ThisNode(node_in_trouble(), {"node-17"})
ABOUT = (
    {"training_job": "llama-7b", "rank": "1", "kind": "straggler", "instance": "node-17:9400"},
    {"gpu": "1", "node": "node-17", "capture": "stacks"},
    {"uuid": "GPU-5f1d0000-0000-0000-0000-000000000001", "instance": "[::1]:9400"},
)


def run(data: bytes) -> None:
    try:
        alerts = AlertmanagerPayload.model_validate_json(data, strict=True).alerts
    except ValidationError as error:
        assert mistakes(error, AlertmanagerPayload)
        return
    for one in alerts:
        assert one.fingerprint and one.key and "\n" not in one.name
        try:
            found = targets_of(one.labels, NODE)
        except Settled as settled:
            assert len(str(settled)) < 300
        else:
            assert all(target.job for target in found)


def target(folder: Path) -> Target:
    bodies = [json.dumps(notification(alert(**labels))).encode() for labels in ABOUT]
    words = b'"alerts": "labels": "firing" "training_job" "rank" "gpu" "capture" "instance" \\u0661'
    return Target(run, bodies, json_tokens(words))
