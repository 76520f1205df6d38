"""The named templates with which another chart adds the shim, or the whole daemon, to its pods."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helm import chart
from tests.helm.trainings import mounts_of, pod_of


def test_a_training_pod_sees_its_own_folders_alone(
    helm3: Path, helm4: Path, training: Path
) -> None:
    for helm in (helm3, helm4):
        spec = pod_of(helm, training)
        paths = {each["name"]: each.get("hostPath", {}).get("path") for each in spec["volumes"]}
        assert paths == {
            "warpwatch-shim": None,
            "warpwatch-run": "/run/warpwatch/pods",
            "warpwatch-inbox": "/var/lib/warpwatch/inbox/pods",
        }
        (container,) = spec["containers"]
        mounts = mounts_of(container)
        for name, place in (
            ("warpwatch-run", "/run/warpwatch"),
            ("warpwatch-inbox", "/var/lib/warpwatch/inbox"),
        ):
            assert mounts[name]["mountPath"] == place
            assert mounts[name]["subPathExpr"] == "$(WARPWATCH_POD_UID)"
        assert mounts["warpwatch-shim"]["readOnly"] is True
        (shim,) = spec["initContainers"]
        assert shim["args"] == ["shim", "/opt/warpwatch-shim"]
        assert "restartPolicy" not in shim


def test_the_shim_is_loaded_from_where_it_was_copied(helm4: Path, training: Path) -> None:
    (container,) = pod_of(helm4, training)["containers"]
    assert chart.environment(container) == {
        "WARPWATCH": "1",
        "PYTHONPATH": "/opt/warpwatch-shim/warpwatch/bootstrap",
    }
    fields = {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"]
        for each in container["env"]
        if "valueFrom" in each
    }
    assert fields == {
        "WARPWATCH_POD_UID": "metadata.uid",
        "WARPWATCH_POD_OWNER": "metadata.labels['batch.kubernetes.io/job-name']",
    }


def test_a_daemon_without_root_meets_trainers_where_they_name_it(
    helm4: Path, training: Path
) -> None:
    spec = pod_of(helm4, training, "nonRoot=true", "nonRootUser.sharedFolders=true")
    (container,) = spec["containers"]
    assert chart.environment(container)["WARPWATCH_DIR"] == "/run/warpwatch"
    assert "subPathExpr" not in mounts_of(container)["warpwatch-run"]


def test_a_sidecar_stays_and_never_holds_up_the_job(
    helm3: Path, helm4: Path, training: Path
) -> None:
    for helm in (helm3, helm4):
        spec = pod_of(helm, training, "mode=sidecar", "config.triggers.captures_per_hour=1")
        shim, daemon = spec["initContainers"]
        assert daemon["restartPolicy"] == "Always"
        assert daemon["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert not {"readinessProbe", "startupProbe"} & set(daemon)
        assert not [each for each in spec["volumes"] if "hostPath" in each]
        for container in (shim, daemon):
            context = container["securityContext"]
            assert (context["runAsNonRoot"], context["runAsUser"]) == (True, 65532)
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True


def test_daemon_and_trainer_of_a_pod_meet(helm4: Path, training: Path) -> None:
    spec = pod_of(helm4, training, "mode=sidecar")
    _, daemon = spec["initContainers"]
    (trainer,) = spec["containers"]
    ours, theirs = chart.environment(daemon), chart.environment(trainer)
    for name in ("WARPWATCH_DIR", "WARPWATCH_INBOX"):
        assert ours[name] == theirs[name]
    for name in ("warpwatch-run", "warpwatch-data"):
        assert mounts_of(daemon)[name] == mounts_of(trainer)[name]
    assert ours["WARPWATCH_SOURCES__NVML__ENABLED"] == "false"


def test_beside_the_daemon_set_a_training_makes_nothing_but_itself(
    helm3: Path, helm4: Path, training: Path
) -> None:
    """Each release of it would have a DaemonSet else, which would fight over the node's folder."""
    for helm in (helm3, helm4):
        objects = chart.render(helm, "--set", "warpwatch.mode=templates", chart=training)
        assert [each["kind"] for each in objects] == ["Job"]
        made = chart.only(chart.render(helm, chart=training), "Job")
        assert objects[0]["spec"] == made["spec"]


@pytest.mark.parametrize("value", ["existingConfigMap=mine", "config.store.max_bytes=1GiB"])
def test_a_sidecar_has_its_configuration_and_its_token(
    helm4: Path, training: Path, value: str
) -> None:
    spec = pod_of(helm4, training, "mode=sidecar", value, "token.existingSecret=captures")
    _, daemon = spec["initContainers"]
    volumes = {each["name"]: each for each in spec["volumes"]}
    name = "mine" if "=mine" in value else "warpwatch"
    assert volumes["warpwatch-config"]["configMap"] == {"name": name}
    assert "--config=/etc/warpwatch/warpwatch.yaml" in daemon["args"]
    assert mounts_of(daemon)["warpwatch-config"]["mountPath"] == "/etc/warpwatch"
    assert volumes["warpwatch-token"]["secret"] == {"secretName": "captures"}
    assert mounts_of(daemon)["warpwatch-token"]["mountPath"] == "/etc/warpwatch-token"
    file = chart.environment(daemon)["WARPWATCH_HTTP__TOKEN_FILE"]
    assert file == "/etc/warpwatch-token/token"
    (trainer,) = spec["containers"]
    assert "warpwatch-token" not in mounts_of(trainer)


def test_an_older_cluster_is_told_that_it_cannot_have_sidecars(helm4: Path, training: Path) -> None:
    command = ("template", str(training), "--kube-version", "1.28", "--set")
    done = chart.run(helm4, *command, "warpwatch.mode=sidecar")
    assert done.returncode != 0
    assert "the sidecar needs Kubernetes 1.29" in done.stderr
