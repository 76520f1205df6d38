"""Runs the loops of training_loops.py and data_loops.py under the hooks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_loops(folder: Path, *names: str, **environ: str) -> dict[str, dict[str, Any]]:
    """What was counted in each, by name. There is no daemon."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WARPWATCH")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.client.run_loops", str(folder), *names],
        cwd=ROOT,
        env={**kept, "WARPWATCH_DIR": str(folder / "nowhere"), **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [reported["loop"] for reported in found] == list(names)
    assert all(reported["faults"] == 0 for reported in found), found
    return {reported["loop"]: reported for reported in found}
