"""The policy that keeps tenants apart: its expressions are run, by CEL's C++ implementation."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.helm import chart
from tests.helm.chart import pod_of
from tests.helm.tenants_policy import refusals

EXAMPLES = chart.ROOT / "examples/kubernetes"
HOST_PATH, SUB_PATH, POD_UID = "hostPath is", "subPathExpr $(", "is the pod's own UID"

Change = Callable[[chart.Object], object]


@pytest.fixture(scope="module")
def policy(helm4: Path) -> chart.Object:
    """With the folders that the examples have."""
    objects = chart.render(helm4, "--set", "tenantsPolicy.enabled=true", version="1.30")
    return chart.only(objects, "ValidatingAdmissionPolicy")


@pytest.fixture(scope="module")
def elsewhere(helm4: Path) -> chart.Object:
    """With another folder for the rings, and one that is the tenants' own."""
    objects = chart.scenario(helm4, "tenants-policy-values.yaml")
    return chart.only(objects, "ValidatingAdmissionPolicy")


def example(name: str) -> chart.Object:
    template: chart.Object = yaml.safe_load((EXAMPLES / name).read_text())["spec"]["template"]
    return template


def mount(name: str, **options: str) -> chart.Object:
    return {"name": "x", "volumeMounts": [{"name": name, "mountPath": "/x", **options}]}


def host(path: str) -> Change:
    volume = {"name": "more", "hostPath": {"path": path}}
    return lambda pod: pod["spec"]["volumes"].append(volume)


def mounts(name: str, into: str = "containers", **options: str) -> Change:
    return lambda pod: pod["spec"].setdefault(into, []).append(mount(name, **options))


def env(*entries: chart.Object) -> Change:
    return lambda pod: pod["spec"]["containers"][0].update(env=list(entries))


OWN = {"name": "WARPWATCH_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
OTHER_FIELD = {"name": OWN["name"], "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
SECRET = {"name": OWN["name"], "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}
LITERAL = {"name": OWN["name"], "value": "b7"}


def test_pods_without_a_folder_of_the_host_and_the_examples_are_let_in(policy):
    assert refusals(policy, example("job.yaml")) == []
    assert refusals(policy, example("job-with-sidecar.yaml")) == []
    assert refusals(policy, {"spec": {"containers": [{"name": "x"}]}}) == []
    pod = example("job.yaml")
    pod["spec"]["volumes"].append({"name": "scratch", "emptyDir": {}})
    pod["spec"]["containers"].append(mount("scratch", subPath="a"))
    assert refusals(policy, pod) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (host("/run/warpwatch"), HOST_PATH),
        (host("/run/warpwatch/pods/"), HOST_PATH),
        (host("/run/warpwatch/pods/b7"), HOST_PATH),
        (host("/var/lib/warpwatch/captures"), HOST_PATH),
        # Above them, and another name of the same.
        (host("/run"), HOST_PATH),
        (host("/var/run/warpwatch/pods"), HOST_PATH),
        (mounts("warpwatch-run", "initContainers"), SUB_PATH),
        (mounts("warpwatch-run", subPath="b7"), SUB_PATH),
        (mounts("warpwatch-inbox", "ephemeralContainers"), SUB_PATH),
        (mounts("warpwatch-run", subPathExpr="$(WARPWATCH_POD_UID)/.."), SUB_PATH),
        (env(), POD_UID),
        (env(LITERAL), POD_UID),
        (env(OTHER_FIELD), POD_UID),
        (env(SECRET), POD_UID),
        # The last one of a name counts.
        (env(OWN, LITERAL), POD_UID),
    ],
)
def test_a_dishonest_manifest_is_refused(policy, change, message):
    pod = copy.deepcopy(example("job.yaml"))
    change(pod)
    assert message in " ".join(refusals(policy, pod))


def test_the_folders_are_those_of_the_release(helm4, training, elsewhere):
    pod = {"spec": pod_of(helm4, training, "hostPaths.run=/run/gpu/warpwatch")}
    assert refusals(elsewhere, pod) == []
    host("/mnt/datasets")(pod)
    assert refusals(elsewhere, pod) == []
    host("/mnt")(pod)
    (message,) = refusals(elsewhere, pod)
    assert "is /run/gpu/warpwatch/pods or /var/lib/warpwatch/inbox/pods" in message
    assert HOST_PATH in refusals(elsewhere, example("job.yaml"))[0]


def test_it_is_in_force_where_a_namespace_is_a_tenants(helm4: Path) -> None:
    objects = chart.render(helm4, "--set", "tenantsPolicy.enabled=true", version="1.30")
    binding = chart.only(objects, "ValidatingAdmissionPolicyBinding")["spec"]
    selector = binding["matchResources"]["namespaceSelector"]
    assert selector == {"matchLabels": {"warpwatch/tenant": "true"}}
