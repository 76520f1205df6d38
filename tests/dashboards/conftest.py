"""Prometheus' own promtool: what says whether rules and expressions mean what they should."""

import os
import shutil
import subprocess
from collections.abc import Callable

import pytest

from tests.dashboards.monitoring.prometheus import FRUGAL

Promtool = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def promtool() -> Promtool:
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("promtool is not installed")

    environment = {**os.environ, **FRUGAL}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [binary, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)

    return run
