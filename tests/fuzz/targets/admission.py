"""Bodies of the admission webhook: any bytes that reach its port."""

import base64
import json
from pathlib import Path

from tests.fleet.kubernetes.webhook import LABELS, env_of, pod_of
from tests.fuzz.watch import Target, json_tokens
from warpwatch_fleet.kubernetes import injection
from warpwatch_fleet.kubernetes.injection import Parts

PARTS = Parts(
    initContainers=[{"name": "warpwatch-shim", "image": "shim"}],
    env=[
        {"name": "PYTHONPATH", "value": "/opt/shim"},
        {"name": "WARPWATCH_POD_OWNER", "valueFrom": {}},
    ],
    volumeMounts=[{"name": "shim", "mountPath": "/opt/shim"}],
    volumes=[{"name": "shim", "emptyDir": {}}],
)


def run(data: bytes) -> None:
    answer = injection.answer(data, PARTS)
    assert answer.status_code in (200, 400)
    if answer.status_code == 200:
        response = json.loads(bytes(answer.body))["response"]
        assert response["allowed"] is True
        for operation in json.loads(base64.b64decode(response.get("patch", "W10="))):
            assert operation["op"] in ("add", "replace") and operation["path"].startswith("/spec/")


def target(folder: Path) -> Target:
    pods = [pod_of(), pod_of(labels={}), pod_of(labels=LABELS)]
    pods[2]["spec"]["containers"][0]["env"] = [{"name": "PYTHONPATH", "value": "/a:/b"}]
    assert env_of(pods[2]["spec"]["containers"][0])
    seeds = [
        json.dumps({"request": {"uid": "r1", "namespace": "team", "object": pod}}).encode()
        for pod in pods
    ]
    words = b'"containers": "env": "labels": "spec": "volumeMounts": "limits": "valueFrom":'
    return Target(run, seeds, (*json_tokens(words), b'"kube-system"'))
