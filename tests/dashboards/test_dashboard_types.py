"""The dashboards against Grafana's own types."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.dashboards.expressions import NAMES, dashboards
from tests.waiting import DEADLINE_S

PACKAGES = ("@grafana/schema@13.2.2", "typescript@5")

pytestmark = [
    pytest.mark.alerts,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Grafana's types and the compiler are."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "package.json").write_text("{}")
    shutil.copy(Path(__file__).with_name("plain.ts"), folder)
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", *PACKAGES]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=DEADLINE_S)
    return folder


def compiled(folder: Path, dashboard: object) -> str:
    """Return the compiler's errors."""
    (folder / "dashboard.ts").write_text(
        "import type { Dashboard } from './plain';\n"
        f"export const dashboard: Dashboard = {json.dumps(dashboard)};\n"
    )
    options = ["--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "bundler"]
    command = ["node_modules/.bin/tsc", *options, "--module", "esnext", "dashboard.ts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S)
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_grafana_takes_the_dashboard(name: str, folder: Path) -> None:
    assert compiled(folder, dashboards()[name]) == ""
