"""Runs the loops of this folder under the hooks, those of training_loops.py and others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_loops(
    folder: Path, *names: str, under: Sequence[str] = (), **environ: str
) -> dict[str, dict[str, Any]]:
    """What was counted in each, by name. There is no daemon. ``under``: what comes before."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WARPWATCH")}
    done = subprocess.run(
        [sys.executable, *under, "-m", "tests.client.run_loops", str(folder), *names],
        cwd=ROOT,
        env={**kept, "WARPWATCH_DIR": str(folder / "nowhere"), **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [reported["loop"] for reported in found] == list(names)
    assert all(reported["faults"] == 0 for reported in found), found
    return {reported["loop"]: reported for reported in found}
