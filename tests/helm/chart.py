"""The chart as Helm renders it, each output once, and another chart that depends on it."""

import functools
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.helm import schemas

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm/warpwatch"
PRESETS = sorted(path.name for path in (CHART / "presets").glob("*.yaml"))
SCENARIOS = sorted(path.name for path in (CHART / "ci").glob("*-values.yaml")) + PRESETS
# The oldest with native sidecars, and the newest that there is.
VERSIONS = ("1.29", "1.37")
# Scenarios of what the oldest has not yet.
_SINCE = {"tenants-policy-values.yaml": "1.30"}
RELEASE = ("warpwatch", "--namespace", "monitoring")

Object = dict[str, Any]


def run(helm: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(helm), *arguments], capture_output=True, text=True, timeout=300)


def sets(*values: str) -> tuple[str, ...]:
    return tuple(part for value in values for part in ("--set", value))


@functools.cache
def render(
    helm: Path, *arguments: str, chart: Path = CHART, version: str = VERSIONS[0]
) -> tuple[Object, ...]:
    """Return the objects that `helm install` would make."""
    command = ("template", *RELEASE, str(chart), "--kube-version", version, *arguments)
    done = run(helm, *command)
    assert done.returncode == 0, done.stderr
    loaded = yaml.load_all(done.stdout, Loader=yaml.CSafeLoader)
    return tuple(each for each in loaded if each is not None)


def versions(name: str) -> tuple[str, str]:
    """The oldest Kubernetes for a scenario, and the newest."""
    return _SINCE.get(name, VERSIONS[0]), VERSIONS[1]


def scenario(helm: Path, name: str) -> tuple[Object, ...]:
    file = CHART / ("presets" if name in PRESETS else "ci") / name
    return render(helm, "--values", str(file), version=versions(name)[0])


def refusal(helm: Path, *values: str, chart: Path = CHART, version: str = VERSIONS[1]) -> str:
    command = ("template", *RELEASE, str(chart), "--kube-version", version, *sets(*values))
    done = run(helm, *command)
    assert done.returncode != 0, f"{values} was accepted"
    return done.stderr


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def only(objects: tuple[Object, ...], kind: str) -> Object:
    (found,) = of_kind(objects, kind)
    return found


def daemon_set(objects: tuple[Object, ...]) -> Object:
    spec: Object = only(objects, "DaemonSet")["spec"]["template"]["spec"]
    return spec


def environment(container: Object) -> dict[str, str]:
    """Variables with a value in the manifest; ``$(POD_IP)`` is what a pod would have."""
    values = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    return {name: value.replace("$(POD_IP)", "10.0.0.1") for name, value in values.items()}


def pod_of(helm: Path, training: Path, *values: str) -> Object:
    """The spec of the pod that the other chart makes; ``values`` are of ours."""
    objects = render(helm, *sets(*(f"warpwatch.{value}" for value in values)), chart=training)
    job = only(objects, "Job")
    schemas.check(job, VERSIONS[0])
    spec: Object = job["spec"]["template"]["spec"]
    return spec


def mounts_of(container: Object) -> dict[str, Object]:
    return {each["name"]: each for each in container["volumeMounts"]}
