"""The shim in pods by a label: what the chart's parts become in a pod, asked for by HTTPS."""

import base64
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cases import cases
from tests.fleet.kubernetes.api_server import certificate
from tests.fleet.kubernetes.webhook import BOOTSTRAP, GPU, LABELS, Served, env_of, pod_of
from tests.helm import chart
from tests.helm.tenants_policy import refusals
from tests.waiting import DEADLINE_S, eventually
from warpwatch_telemetry.errors import UsageError


def example(name: str) -> Any:
    """Return the spec of an example's object."""
    return yaml.safe_load((chart.ROOT / f"examples/kubernetes/{name}.yaml").read_text())["spec"]


def test_a_labelled_pod_gets_once_what_the_example_writes_by_hand(served: Served) -> None:
    written = example("job")["template"]["spec"]
    pod = served.injected(pod_of())
    assert served.injected(pod) == pod
    spec = pod["spec"]
    (ours,), (theirs,) = spec["containers"], written["containers"]
    for key in ("env", "volumeMounts"):
        assert sorted(map(str, ours[key])) == sorted(map(str, theirs[key]))
    assert spec["volumes"] == written["volumes"]
    (init,), (by_hand,) = spec["initContainers"], written["initContainers"]
    assert (init["args"], init["securityContext"]) == (by_hand["args"], by_hand["securityContext"])


def test_the_examples_over_nodes_and_of_a_server_need_a_label_alone(served: Served) -> None:
    replicas = example("pytorchjob")["pytorchReplicaSpecs"].values()
    for pod in (*(one["template"] for one in replicas), example("vllm")["template"]):
        spec = served.injected(pod)["spec"]
        assert [one["name"] for one in spec["initContainers"]] == ["warpwatch-shim"]
        environ = env_of(spec["containers"][0])
        assert (environ["WARPWATCH"], environ["PYTHONPATH"]) == ("1", BOOTSTRAP)


@pytest.mark.parametrize(("labels", "namespace"), cases(__file__)["others"])
def test_another_pod_stays_as_it_is(served: Served, labels: Any, namespace: str) -> None:
    pod = pod_of(labels=labels)
    assert served.injected(pod, namespace=namespace) == pod


def test_the_containers_with_gpus_get_it(served: Served) -> None:
    proxy, train = {"name": "proxy"}, {"name": "train", "resources": GPU}
    spec = served.injected(pod_of(proxy, train, train | {"name": "more"}))["spec"]
    assert ["env" in one for one in spec["containers"]] == [False, True, True]
    spec = served.injected(pod_of({"name": "a"}, {"name": "b"}))["spec"]
    assert ["env" in one for one in spec["containers"]] == [True, False]


def test_what_the_pod_has_itself_stays_and_a_path_from_elsewhere_has_a_warning(served):
    own = [{"name": "PYTHONPATH", "value": "/src:/lib"}, {"name": "WARPWATCH", "value": "0"}]
    volume, mount = {"name": "data", "emptyDir": {}}, {"name": "data", "mountPath": "/data"}
    mounts = [mount, {"name": "own", "mountPath": "/opt/warpwatch-shim"}]
    train: dict[str, Any] = {"name": "train", "env": own, "volumeMounts": mounts}
    train["resources"] = GPU
    spec = served.injected(pod_of({"name": "proxy"}, train, volumes=[volume]))["spec"]
    assert "env" not in spec["containers"].pop(0)
    env = env_of(spec["containers"][0])
    assert env["PYTHONPATH"] == f"{BOOTSTRAP}:/src:/lib"
    assert env["WARPWATCH"] == "0"
    assert spec["volumes"][0] == volume
    there = [one["mountPath"] for one in spec["containers"][0]["volumeMounts"]]
    assert (there[0], there.count("/opt/warpwatch-shim")) == ("/data", 1)
    train["env"] = [{"name": "PYTHONPATH"}]
    (container,) = served.injected(pod_of(train))["spec"]["containers"]
    assert env_of(container)["PYTHONPATH"] == BOOTSTRAP
    source = {"configMapKeyRef": {"name": "c", "key": "k"}}
    train["env"] = [{"name": "PYTHONPATH", "valueFrom": source}]
    (warning,) = served.review(pod_of(train))["warnings"]
    assert warning == f"train: PYTHONPATH is from elsewhere; add {BOOTSTRAP} to it"


@pytest.mark.parametrize(("labels", "named"), cases(__file__)["names"])
def test_the_job_has_the_name_that_all_of_its_pods_have(served, labels, named):
    pod = pod_of(labels={"warpwatch.dev/inject": "true", **labels})
    env = env_of(served.injected(pod)["spec"]["containers"][0])
    assert env["WARPWATCH_POD_OWNER"]["fieldRef"]["fieldPath"] == f"metadata.labels['{named}']"


def test_tenants_may_have_what_is_injected(served: Served, helm4: Path) -> None:
    objects = chart.render(helm4, "--set", "tenantsPolicy.enabled=true", version="1.30")
    policy = chart.only(objects, "ValidatingAdmissionPolicy")
    assert refusals(policy, served.injected(pod_of())) == []


def test_the_charts_own_certificate_is_of_the_service_that_is_asked(helm4, tmp_path):
    own = ("fleet.enabled=true", "fleet.kubernetes.injection.enabled=true", "token.create=true")
    sets = [part for value in (*own, "token.allowPlainPeers=true") for part in ("--set", value)]
    objects = chart.render(helm4, *sets)
    (hook,) = chart.only(objects, "MutatingWebhookConfiguration")["webhooks"]
    service = hook["clientConfig"]["service"]
    secret = next(one for one in chart.of_kind(objects, "Secret") if "tls.crt" in one["data"])
    authority = hook["clientConfig"]["caBundle"]
    data = {"ca.crt": authority, **{name: secret["data"][name] for name in ("tls.crt", "tls.key")}}
    for name, content in data.items():
        (tmp_path / name).write_bytes(base64.b64decode(content))
    # The key is that of the certificate.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    host = f"{service['name']}.{service['namespace']}.svc"
    command = ["openssl", "verify", "-CAfile", "ca.crt", "-verify_hostname", host, "tls.crt"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=DEADLINE_S)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b" " * 2_097_152, 400),
        (b" " * 2_097_153, 413),
        (b'{"request": {"object": {"spec": 1}}}', 200),
        (b"[" * 100_000, 400),
        (b'{"request": {"uid": "x"}}', 200),
    ],
    ids=["empty", "open", "list", "largest", "too_large", "no_label", "deep", "no_pod"],
)
def test_what_is_no_review_is_refused(served: Served, body: bytes, status: int) -> None:
    answer = served.http.post("/inject", content=body)
    assert (answer.status_code, b'"allowed":true' in answer.content) == (status, status == 200)
    assert served.http.get("/inject").status_code == 405
    hostile = {"metadata": {"labels": LABELS}, "spec": {"containers": [1]}}
    review = {"request": {"uid": "x", "object": hostile}}
    assert served.http.post("/inject", json=review).status_code == 400
    assert "patch" in served.review(pod_of())


def test_the_webhook_answers_while_the_loop_that_follows_is_busy(served: Served) -> None:
    with served.busy_loop():
        assert "patch" in served.review(pod_of())


def test_a_renewed_certificate_is_taken_up(parts: str, tmp_path: Path) -> None:
    own = Served(tmp_path, parts)
    try:
        certificate(tmp_path)
        context = ssl.create_default_context(cafile=tmp_path / "ca.crt")
        url = f"https://127.0.0.1:{own.port}/inject"

        def is_taken_up() -> bool:
            try:
                return httpx.get(url, verify=context, timeout=DEADLINE_S).status_code == 405
            except httpx.ConnectError:
                return False

        assert eventually(is_taken_up)
    finally:
        own.close()


@pytest.mark.parametrize(
    ("parts", "at"), [("", "file"), ("env: 1", "initContainers"), ("initContainers: []", "env")]
)
def test_parts_that_are_none_are_refused_in_one_line(tmp_path: Path, parts: str, at: str) -> None:
    with pytest.raises(UsageError, match=rf"pod\.yaml: {at}: ") as refused:
        Served(tmp_path, parts)
    assert "\n" not in str(refused.value)
