#!/usr/bin/env python3
"""Writes below each version in the image's requirements the hashes of its wheels.

`make requirements` runs it after a change of a version. It takes the wheels for every Python and
machine that the image may be built for, and fails where one is missing: the image has no compiler.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

# Versions of Python in base images; the Dockerfile's own is among them.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
# The platforms whose wheels Debian 12 and every later system can load.
PLATFORMS = ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
_DOWNLOAD_TIMEOUT_S = 300.0
_PIN = re.compile(r"^(?P<name>[a-z0-9-]+)==(?P<version>\S+)", re.MULTILINE)


def download(pins: list[str], python: str, machine: str, folder: str) -> None:
    platforms = [f"--platform={each}_{machine}" for each in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    command += ["--only-binary=:all:", f"--python-version={python}", *platforms, *pins]
    subprocess.run(command, check=True, timeout=_DOWNLOAD_TIMEOUT_S)


def hashes_by_name(pins: list[str]) -> dict[str, set[str]]:
    found = defaultdict(set)
    with tempfile.TemporaryDirectory() as folder:
        for python in PYTHONS:
            for machine in MACHINES:
                download(pins, python, machine, folder)
        for wheel in Path(folder).iterdir():
            name = wheel.name.partition("-")[0].replace("_", "-").lower()
            found[name].add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    return found


def renew(file: Path) -> None:
    text = file.read_text()
    comment = [line for line in text.splitlines() if line.startswith("#")]
    pins = dict(sorted(_PIN.findall(text)))
    hashes = hashes_by_name([f"{name}=={version}" for name, version in pins.items()])
    entries = [
        " \\\n    --hash=sha256:".join([f"{name}=={version}", *sorted(hashes[name])])
        for name, version in pins.items()
    ]
    file.write_text("\n".join([*comment, *entries]) + "\n")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        renew(Path(argument))
