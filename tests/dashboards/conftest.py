"""Prometheus' own promtool: what says whether rules and expressions mean what they should."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dashboards.monitoring.prometheus import FRUGAL

Promtool = Callable[..., None]
CheckRules = Callable[[Mapping[str, Any]], None]


@pytest.fixture(scope="session")
def promtool() -> Promtool:
    """Run it; what it does not agree with fails the test."""
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("promtool is not installed")

    def run(*arguments: str | Path) -> None:
        options: Any = {"capture_output": True, "text": True, "env": {**os.environ, **FRUGAL}}
        done = subprocess.run([binary, *map(str, arguments)], timeout=300, **options)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture
def check_rules(promtool: Promtool, tmp_path: Path) -> CheckRules:
    """Let `promtool test rules` evaluate a document of tests."""

    def check(document: Mapping[str, Any]) -> None:
        path = tmp_path / "test.yaml"
        path.write_text(yaml.dump(document, Dumper=yaml.CSafeDumper))
        promtool("test", "rules", path)

    return check
