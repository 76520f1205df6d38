"""Running ``warpwatch demo`` to its end."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def demo(store: Path, *faults: str, nodes: int = 1) -> tuple[int, Any, str]:
    """The faults in a row, all where none is named: exit status, JSON, and what it said."""
    command = [sys.executable, "-m", "warpwatch_daemon", "demo", "--once", "--json"]
    command += ["--listen", "127.0.0.1:0", "--store", str(store), "--nodes", str(nodes)]
    command += ["--fault", *faults] if faults else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr
