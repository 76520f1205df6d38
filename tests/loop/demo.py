"""Running ``warpwatch demo`` to its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def demo(fault: str, store: Path) -> tuple[int, Any, str]:
    command = [sys.executable, "-m", "warpwatch_daemon", "demo", "--once", "--json"]
    command += ["--fault", fault, "--listen", "127.0.0.1:0", "--store", str(store)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr
