"""The fake driver, compiled once."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "fake_nvml" / "fake_nvml.c"


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds our own libnvidia-ml.so.1."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the fake driver")
    folder = tmp_path_factory.mktemp("fake_nvml")
    library = folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE)], check=True, timeout=60)
    return folder
