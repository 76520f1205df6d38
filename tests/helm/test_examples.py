"""The manifests and scripts in examples/: what a cluster takes, and what the chart would make."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm import chart, schemas
from tests.helm.chart import mounts_of, pod_of

FOLDER = chart.ROOT / "examples"
MANIFESTS = sorted(path.name for path in (FOLDER / "kubernetes").glob("*.yaml"))
# The fleet puts the shim into its pods.
BY_HAND = [name for name in MANIFESTS if name not in ("pytorchjob.yaml", "vllm.yaml")]
SCRIPTS = sorted(path.name for path in (FOLDER / "slurm").glob("*.sbatch"))


def pods_in(node: Any) -> Iterator[chart.Object]:
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        else:
            yield from (pod for each in node.values() for pod in pods_in(each))
    elif isinstance(node, list):
        yield from (pod for each in node for pod in pods_in(each))


def pods_of(name: str) -> list[chart.Object]:
    pods = list(pods_in(yaml.safe_load((FOLDER / "kubernetes" / name).read_text())))
    assert pods
    return pods


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_cluster_knows_every_field_of_the_pods(name: str) -> None:
    for spec in pods_of(name):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"}, "spec": spec}
        for version in chart.VERSIONS:
            schemas.check(pod, version)
    whole = yaml.safe_load((FOLDER / "kubernetes" / name).read_text())
    if whole["apiVersion"] == "batch/v1":
        schemas.check(whole, chart.VERSIONS[0])


@pytest.mark.parametrize("name", BY_HAND)
def test_a_pod_has_what_the_named_templates_make(helm4: Path, training: Path, name: str) -> None:
    mode = "sidecar" if "sidecar" in name else "daemonset"
    made = pod_of(helm4, training, f"mode={mode}")
    for spec in pods_of(name):
        assert spec["volumes"] == made["volumes"]
        assert spec["initContainers"] == made["initContainers"]
        (container,), (templated,) = spec["containers"], made["containers"]
        assert mounts_of(container) == mounts_of(templated)
        wanted = [each for each in templated["env"] if each["name"] != "WARPWATCH_POD_OWNER"]
        assert [each for each in wanted if each not in container["env"]] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_shell_can_read_the_script(name: str) -> None:
    script = FOLDER / "slurm" / name
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "#SBATCH --job-name=" in script.read_text()
