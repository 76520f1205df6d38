"""On a real API server: the fleet may do what it does, and nothing else; the webhook is asked."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fleet.kubernetes.real import RealApiServer
from tests.fleet.kubernetes.webhook import LABELS, Served, env_of
from tests.helm import chart

pytestmark = pytest.mark.deploy
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
PODS = "/api/v1/namespaces/{}/pods"
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
# Of every account: what it is, and what the server is.
EVERYBODYS = {"selfsubjectaccessreviews", "selfsubjectrulesreviews"}


@pytest.fixture
def fleet(real: RealApiServer) -> Iterator[httpx.Client]:
    token = (real.folder / "token").read_text()
    headers = {"Authorization": f"Bearer {token}"}
    url = f"https://127.0.0.1:{real.port}"
    verify = ssl.create_default_context(cafile=real.folder / "ca.crt")
    with httpx.Client(base_url=url, verify=verify, headers=headers) as client:
        yield client


def test_it_may_do_nothing_else(fleet: httpx.Client) -> None:
    asked = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview"}
    said = fleet.post(REVIEWS, json={**asked, "spec": {"namespace": "monitoring"}}).json()
    rights = {
        (resource, verb)
        for rule in said["status"]["resourceRules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if resource not in EVERYBODYS
    }
    assert rights == {
        *(("events", verb) for verb in ("create", "patch")),
        *(("nodes", verb) for verb in ("get", "list", "patch")),
        ("nodes/status", "patch"),
        *(("captures", verb) for verb in ("list", "watch")),
        ("captures/status", "patch"),
    }


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/namespaces/monitoring/secrets"),
        ("GET", "/api/v1/pods"),
        ("DELETE", "/api/v1/nodes/gpu-1"),
        ("DELETE", "/api/v1/namespaces/default/events"),
        ("DELETE", "/apis/warpwatch.dev/v1alpha1/namespaces/team/captures"),
        ("GET", "/api/v1/namespaces/kube-system/configmaps"),
    ],
)
def test_what_it_has_no_right_to_is_refused(fleet: httpx.Client, method: str, path: str) -> None:
    assert fleet.request(method, path).status_code == 403


@pytest.fixture
def asked(real: RealApiServer, objects: Any, served: Served) -> Any:
    """The chart's webhook, at an address on loopback; there is no network of services here."""
    real.begin()
    hook = chart.only(objects, "MutatingWebhookConfiguration")
    bundle = base64.b64encode((served.folder / "ca.crt").read_bytes()).decode()
    url = f"https://127.0.0.1:{served.port}/inject"
    own = {**hook["webhooks"][0], "clientConfig": {"url": url, "caBundle": bundle}}
    # Namespaces have no label of their name before 1.21.
    real.ask("POST", HOOKS, {**hook, "webhooks": [own]})
    yield real
    real.ask("DELETE", f"{HOOKS}/{hook['metadata']['name']}")


def pod(name: str, **labels: str) -> Any:
    container = {"name": "train", "image": "pytorch", "command": ["torchrun"]}
    about = {"name": name, "labels": labels}
    spec = {"containers": [container], "automountServiceAccountToken": False}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}


def test_the_api_server_has_the_shim_put_into_a_labelled_pod(asked: RealApiServer) -> None:
    folder = PODS.format("team")
    made = asked.ask("POST", folder, pod("llama-0", **LABELS))
    try:
        (container,), (init,) = made["spec"]["containers"], made["spec"]["initContainers"]
        assert init["args"] == ["shim", "/opt/warpwatch-shim"]
        assert env_of(container)["WARPWATCH"] == "1"
        paths = {one["mountPath"]: one.get("subPathExpr") for one in container["volumeMounts"]}
        assert paths["/run/warpwatch"] == "$(WARPWATCH_POD_UID)"
        plain = asked.ask("POST", folder, pod("other"))
        assert "initContainers" not in plain["spec"]
    finally:
        asked.ask("DELETE", folder)


@pytest.mark.parametrize(
    ("level", "count"), [("restricted", 0), ("baseline", 0), ("privileged", 1)]
)
def test_nothing_is_injected_where_a_host_folder_is_refused(
    asked: RealApiServer, level: str, count: int
) -> None:
    name = f"secured-{level}"
    labels = {"pod-security.kubernetes.io/enforce": level}
    about = {"name": name, "labels": labels}
    asked.ask("POST", "/api/v1/namespaces", {"metadata": about})
    made = asked.ask("POST", PODS.format(name), pod("llama-0", **LABELS))
    assert len(made["spec"].get("initContainers", [])) == count


def test_a_fleet_that_is_away_keeps_no_pod_from_starting(
    asked: RealApiServer, served: Served
) -> None:
    hook = asked.ask("GET", HOOKS)["items"][0]
    away = {**hook["webhooks"][0]}
    away["clientConfig"] = {**away["clientConfig"], "url": "https://127.0.0.1:1/inject"}
    asked.ask("PATCH", f"{HOOKS}/{hook['metadata']['name']}", {"webhooks": [away]})
    made = asked.ask("POST", PODS.format("team"), pod("llama-away", **LABELS))
    asked.ask("DELETE", PODS.format("team"))
    assert "initContainers" not in made["spec"]
