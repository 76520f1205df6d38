"""On a real API server: what the fleet may do, and the chart's webhook."""

import base64
import ssl
from typing import Any

import httpx
import pytest

from tests.fleet.kubernetes.real import RealApiServer
from tests.fleet.kubernetes.webhook import LABELS, Served, env_of
from tests.helm import chart
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.deploy
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
PODS = "/api/v1/namespaces/{}/pods"
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


def test_it_may_do_what_it_does_and_nothing_else(real: RealApiServer) -> None:
    url, ca = f"https://127.0.0.1:{real.port}", real.folder / "ca.crt"
    headers = {"Authorization": f"Bearer {(real.folder / 'token').read_text()}"}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview"}
    verify = ssl.create_default_context(cafile=ca)
    with httpx.Client(base_url=url, verify=verify, headers=headers, timeout=DEADLINE_S) as fleet:
        said = fleet.post(REVIEWS, json={**review, "spec": {"namespace": "monitoring"}}).json()
        assert fleet.get("/api/v1/namespaces/monitoring/secrets").status_code == 403
        assert fleet.delete("/api/v1/nodes/gpu-1").status_code == 403
    rules = said["status"]["resourceRules"]
    found = {(what, verb) for one in rules for what in one["resources"] for verb in one["verbs"]}
    # Rights that each account has for itself.
    found -= {("selfsubjectaccessreviews", "create"), ("selfsubjectrulesreviews", "create")}
    rights = {"events": ("create", "patch"), "nodes": ("get", "list", "patch")}
    rights |= {"nodes/status": ("patch",), "captures/status": ("patch",)}
    rights["captures"] = ("list",)
    assert found == {(what, verb) for what, verbs in rights.items() for verb in verbs}


@pytest.fixture
def asked(
    real: RealApiServer, objects: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The chart's webhook, at an address on loopback; there is no network of services here."""
    real.begin(monkeypatch)
    hook = chart.only(objects, "MutatingWebhookConfiguration")
    bundle = base64.b64encode((served.folder / "ca.crt").read_bytes()).decode()
    url = f"https://127.0.0.1:{served.port}/inject"
    own = {**hook["webhooks"][0], "clientConfig": {"url": url, "caBundle": bundle}}
    # Namespaces have no label of their name before 1.21.
    real.ask("POST", HOOKS, {**hook, "webhooks": [own]})
    yield real
    real.ask("DELETE", f"{HOOKS}/{hook['metadata']['name']}")
    real.ask("DELETE", PODS.format("team"))


def pod(name: str, **labels: str) -> Any:
    container = {"name": "train", "image": "pytorch", "command": ["torchrun"]}
    about = {"name": name, "labels": labels}
    spec = {"containers": [container], "automountServiceAccountToken": False}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}


def test_the_api_server_has_the_shim_put_into_a_labelled_pod(asked: RealApiServer) -> None:
    folder = PODS.format("team")
    made = asked.ask("POST", folder, pod("llama-0", **LABELS))
    (container,), (init,) = made["spec"]["containers"], made["spec"]["initContainers"]
    assert init["args"] == ["shim", "/opt/warpwatch-shim"]
    assert env_of(container)["WARPWATCH"] == "1"
    paths = {one["mountPath"]: one.get("subPathExpr") for one in container["volumeMounts"]}
    assert paths["/run/warpwatch"] == "$(WARPWATCH_POD_UID)"
    plain = asked.ask("POST", folder, pod("other"))
    assert "initContainers" not in plain["spec"]
    # A fleet that is away keeps no pod from starting.
    hook = asked.ask("GET", HOOKS)["items"][0]
    away = {**hook["webhooks"][0]}
    away["clientConfig"] = {**away["clientConfig"], "url": "https://127.0.0.1:1/inject"}
    asked.ask("PATCH", f"{HOOKS}/{hook['metadata']['name']}", {"webhooks": [away]})
    made = asked.ask("POST", folder, pod("llama-away", **LABELS))
    assert "initContainers" not in made["spec"]


@pytest.mark.parametrize(
    ("level", "count"), [("restricted", 0), ("baseline", 0), ("privileged", 1)]
)
def test_nothing_is_injected_where_a_host_folder_is_refused(asked, level, count):
    name = f"secured-{level}"
    labels = {"pod-security.kubernetes.io/enforce": level}
    asked.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
    made = asked.ask("POST", PODS.format(name), pod("llama-0", **LABELS))
    assert len(made["spec"].get("initContainers", [])) == count
