"""Bodies of the admission webhook: any bytes that reach its port."""

import base64
import json
from pathlib import Path

from tests.fleet.kubernetes.webhook import LABELS, env_of, pod_of
from tests.fuzz.watch import Target
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
    tokens = (
        b'"containers":', b'"env":', b'"labels":', b'"spec":', b'"volumeMounts":', b'"limits":',
        b"null", b"[]", b"{}", b"[[[[", b"\\ud800", b"1e999", b'"valueFrom":', b'"kube-system"',
    )  # fmt: skip
    return Target(run, seeds, tokens)
