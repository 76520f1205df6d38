"""The policy that keeps tenants apart: its expressions are run, by CEL's C++ implementation."""

from pathlib import Path

import pytest
import yaml

from tests.cases import cases
from tests.helm import chart
from tests.helm.chart import pod_of
from tests.helm.tenants_policy import refusals

EXAMPLES = chart.ROOT / "examples/kubernetes"


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


def add_host_path(pod: chart.Object, path: str) -> None:
    pod["spec"]["volumes"].append({"name": "more", "hostPath": {"path": path}})


def test_pods_without_a_folder_of_the_host_and_the_examples_are_let_in(policy):
    assert refusals(policy, example("job.yaml")) == []
    assert refusals(policy, example("job-with-sidecar.yaml")) == []
    assert refusals(policy, {"spec": {"containers": [{"name": "x"}]}}) == []
    pod = example("job.yaml")
    pod["spec"]["volumes"].append({"name": "scratch", "emptyDir": {}})
    pod["spec"]["containers"].append(mount("scratch", subPath="a"))
    assert refusals(policy, pod) == []


@pytest.mark.parametrize(("part", "given", "message"), cases(__file__)["refused"])
def test_a_dishonest_manifest_is_refused(policy, part, given, message):
    pod = example("job.yaml")
    if part == "host":
        add_host_path(pod, given)
    elif part == "env":
        entries = [{"name": "WARPWATCH_POD_UID"} | one for one in given]
        pod["spec"]["containers"][0]["env"] = entries
    else:
        pod["spec"].setdefault(part, []).append(mount(**given))
    assert message in " ".join(refusals(policy, pod))


def test_the_folders_are_those_of_the_release(helm4, training, elsewhere):
    pod = {"spec": pod_of(helm4, training, "hostPaths.run=/run/gpu/warpwatch")}
    assert refusals(elsewhere, pod) == []
    add_host_path(pod, "/mnt/datasets")
    assert refusals(elsewhere, pod) == []
    add_host_path(pod, "/mnt")
    (message,) = refusals(elsewhere, pod)
    assert "is /run/gpu/warpwatch/pods or /var/lib/warpwatch/inbox/pods" in message
    assert "hostPath is" in refusals(elsewhere, example("job.yaml"))[0]


def test_it_is_in_force_where_a_namespace_is_a_tenants(helm4: Path) -> None:
    objects = chart.render(helm4, "--set", "tenantsPolicy.enabled=true", version="1.30")
    binding = chart.only(objects, "ValidatingAdmissionPolicyBinding")["spec"]
    selector = binding["matchResources"]["namespaceSelector"]
    assert selector == {"matchLabels": {"warpwatch/tenant": "true"}}
