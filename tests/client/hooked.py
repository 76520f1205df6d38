"""Runs the loops of this folder, each in a process that a server forked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.client.fork_server import ForkServer

RUN = "import sys\nfrom tests.client.loop_base import run\nrun(sys.argv[2])"


def run_loops(
    server: ForkServer, folder: Path, *names: str, **environ: str
) -> dict[str, dict[str, Any]]:
    """What was counted in each, by name. There is no daemon."""
    found = {}
    for name in names:
        environ = {**os.environ, "WARPWATCH_DIR": str(folder / "nowhere"), **environ}
        process = server.fork(RUN, str(folder), name, environ=environ)
        output, errors = process.communicate()
        process.kill()
        assert process.returncode == 0, errors
        found[name] = json.loads(output)
        assert (found[name]["loop"], found[name]["faults"]) == (name, 0), found[name]
    return found
