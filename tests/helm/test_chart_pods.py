"""What is put into pods and objects by values, as other charts call them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helm import chart
from warpwatch._version import __version__

IMAGE = "warpwatch/warpwatch"


def rendered(helm: Path, *values: str) -> tuple[chart.Object, ...]:
    return chart.render(helm, *(part for value in values for part in ("--set", value)))


def daemons(helm: Path, *values: str) -> chart.Object:
    template: chart.Object = chart.only(rendered(helm, *values), "DaemonSet")["spec"]["template"]
    return template


@pytest.mark.parametrize(
    ("values", "image"),
    [
        ((), f"ghcr.io/{IMAGE}:{__version__}"),
        (("image.registry=mirror.local/x",), f"mirror.local/x/{IMAGE}:{__version__}"),
        (("global.imageRegistry=all.local",), f"all.local/{IMAGE}:{__version__}"),
        (("image.registry=", "image.tag=v1"), f"{IMAGE}:v1"),
    ],
)
def test_images_come_from_the_registry_that_is_named(
    helm4: Path, values: tuple[str, ...], image: str
) -> None:
    (container,) = daemons(helm4, *values)["spec"]["containers"]
    assert container["image"] == image


def test_pods_have_common_labels_and_no_version(helm4: Path) -> None:
    objects = chart.scenario(helm4, "fleet-kubernetes-values.yaml")
    for kind in ("DaemonSet", "StatefulSet"):
        labels = chart.only(objects, kind)["spec"]["template"]["metadata"]["labels"]
        assert labels["team"] == "platform"
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & labels.keys()
    assert all(each["metadata"]["labels"]["team"] == "platform" for each in objects)


def test_a_daemon_stays_where_gpus_are_full_or_tainted(helm4: Path) -> None:
    spec = daemons(helm4)["spec"]
    assert spec["priorityClassName"] == "system-node-critical"
    keys = {one["key"] for one in spec["tolerations"] if one["operator"] == "Exists"}
    assert {"nvidia.com/gpu", "sku", "warpwatch.dev/gpu-fault"} <= keys
    own = daemons(helm4, "priorityClass.create=true")["spec"]
    assert own["priorityClassName"] == "warpwatch"


def test_more_of_a_pod_and_more_objects(helm4: Path) -> None:
    more = ("initContainers[0].name=wait", "dnsConfig.nameservers[0]=10.0.0.10")
    objects = rendered(helm4, *more)
    spec = chart.only(objects, "DaemonSet")["spec"]["template"]["spec"]
    assert spec["initContainers"] == [{"name": "wait"}]
    assert spec["dnsConfig"] == {"nameservers": ["10.0.0.10"]}
    quota = chart.only(chart.scenario(helm4, "gke.yaml"), "ResourceQuota")
    assert quota["metadata"] == {"name": "warpwatch-critical", "namespace": "monitoring"}


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_a_monitor_may_be_elsewhere_and_limited(helm4: Path, kind: str) -> None:
    key = kind[0].lower() + kind[1:]
    values = ("enabled=true", "namespace=stack", "sampleLimit=5000", "attachMetadata.node=true")
    objects = rendered(helm4, *(f"{key}.{value}" for value in (*values, "annotations.a=b")))
    monitor = chart.only(objects, kind)
    assert monitor["metadata"]["namespace"] == "stack"
    assert monitor["metadata"]["annotations"] == {"a": "b"}
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["monitoring"]}
    assert monitor["spec"]["sampleLimit"] == 5000
    assert monitor["spec"]["attachMetadata"] == {"node": True}


@pytest.mark.parametrize("name", chart.PRESETS)
def test_a_preset_is_one_of_both_helms(helm3: Path, helm4: Path, name: str) -> None:
    values = str(chart.CHART / "presets" / name)
    for helm in (helm3, helm4):
        done = chart.run(helm, "lint", "--strict", str(chart.CHART), "--values", values)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("fleet.kubernetes.taints=true",), "set fleet.kubernetes.conditions"),
        (
            ("fleet.kubernetes.injection.enabled=true", "nonRoot=true"),
            "injection needs host folders",
        ),
        (
            (
                "fleet.kubernetes.injection.enabled=true",
                "fleet.kubernetes.injection.existingSecret=a",
            ),
            "existingSecret needs caBundle",
        ),
    ],
)
def test_what_the_fleet_could_not_do_is_refused(
    helm4: Path, values: tuple[str, ...], message: str
) -> None:
    fleet = ("fleet.enabled=true", "token.create=true", "token.allowPlainPeers=true")
    assert message in chart.refusal(helm4, *fleet, *values)


def test_a_fleet_that_asks_nothing_has_no_token(helm4: Path) -> None:
    objects = chart.scenario(helm4, "fleet-values.yaml")
    pod = chart.only(objects, "StatefulSet")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert chart.of_kind(objects, "ClusterRole") == []
