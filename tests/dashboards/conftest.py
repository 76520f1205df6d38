"""Prometheus' own promtool: what says whether rules and expressions mean what they should."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest

Promtool = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def promtool() -> Promtool:
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("promtool is not installed")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=60)

    return run
