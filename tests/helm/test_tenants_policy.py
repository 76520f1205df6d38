"""The policy that keeps tenants apart: its expressions are run, by CEL's C++ implementation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from cel_expr_python import cel
from cel_expr_python.ext import ext_optional

from tests.helm import chart, schemas

FOLDER = chart.ROOT / "examples/kubernetes"
POLICY, BINDING = yaml.safe_load_all((FOLDER / "tenants-policy.yaml").read_text())
ENVIRONMENT = cel.NewEnv(
    variables={"object": cel.Type.DYN, "variables": cel.Type.DYN},
    extensions=[ext_optional.ExtOptional()],
)
HOST_PATH, SUB_PATH, POD_UID = "hostPath is", "subPathExpr $(", "is the pod's own UID"

Change = Callable[[chart.Object], object]


def evaluate(expression: str, pod: chart.Object, variables: chart.Object) -> Any:
    result = ENVIRONMENT.compile(expression).eval(data={"object": pod, "variables": variables})
    assert result.type().name() != "error", result
    return result.plain_value()


def refusals(pod: chart.Object) -> list[str]:
    """What the API server would say."""
    variables: chart.Object = {}
    for each in POLICY["spec"]["variables"]:
        variables[each["name"]] = evaluate(each["expression"], pod, variables)
    rules = POLICY["spec"]["validations"]
    return [e["message"] for e in rules if evaluate(e["expression"], pod, variables) is not True]


def pod_of(name: str) -> chart.Object:
    template: chart.Object = yaml.safe_load((FOLDER / name).read_text())["spec"]["template"]
    return template


def mount(name: str, **options: str) -> chart.Object:
    return {"name": "x", "volumeMounts": [{"name": name, "mountPath": "/x", **options}]}


def host(path: str) -> Change:
    volume = {"name": "more", "hostPath": {"path": path}}
    return lambda pod: pod["spec"]["volumes"].append(volume)


def env(*entries: chart.Object) -> Change:
    return lambda pod: pod["spec"]["containers"][0].update(env=list(entries))


OWN = {"name": "WARPWATCH_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
OTHER_FIELD = {"name": OWN["name"], "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
SECRET = {"name": OWN["name"], "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}
LITERAL = {"name": OWN["name"], "value": "b7"}


def test_the_cluster_knows_every_field() -> None:
    for each in (POLICY, BINDING):
        schemas.check(each, chart.VERSIONS[-1])
    assert BINDING["spec"]["policyName"] == POLICY["metadata"]["name"]


def test_pods_without_a_folder_of_the_host_and_the_examples_are_let_in() -> None:
    assert refusals(pod_of("job.yaml")) == []
    assert refusals(pod_of("job-with-sidecar.yaml")) == []
    assert refusals({"spec": {"containers": [{"name": "x"}]}}) == []


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
        (lambda pod: pod["spec"]["initContainers"].append(mount("warpwatch-run")), SUB_PATH),
        (
            lambda pod: pod["spec"]["containers"].append(mount("warpwatch-run", subPath="b7")),
            SUB_PATH,
        ),
        (
            lambda pod: pod["spec"].update(ephemeralContainers=[mount("warpwatch-inbox")]),
            SUB_PATH,
        ),
        (
            lambda pod: pod["spec"]["containers"].append(
                mount("warpwatch-run", subPathExpr="$(WARPWATCH_POD_UID)/..")
            ),
            SUB_PATH,
        ),
        (env(), POD_UID),
        (env(LITERAL), POD_UID),
        (env(OTHER_FIELD), POD_UID),
        (env(SECRET), POD_UID),
        # The last one of a name counts.
        (env(OWN, LITERAL), POD_UID),
    ],
)
def test_a_dishonest_manifest_is_refused(change: Change, message: str) -> None:
    pod = copy.deepcopy(pod_of("job.yaml"))
    change(pod)
    assert message in " ".join(refusals(pod))


def test_other_volumes_are_mounted_as_anybody_likes() -> None:
    pod = pod_of("job.yaml")
    pod["spec"]["volumes"].append({"name": "scratch", "emptyDir": {}})
    pod["spec"]["containers"].append(mount("scratch", subPath="a"))
    assert refusals(pod) == []
