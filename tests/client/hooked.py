"""Runs the loops of this folder, each in a process that a server forked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.client.fork_server import ForkServer

RUN = "import sys\nfrom tests.client.loop_base import run\nrun(sys.argv[2])"


class Loops(dict[str, dict[str, Any]]):
    """What was counted in each loop, by its name. It runs when it is asked for, with no daemon."""

    def __init__(self, server: ForkServer, folder: Path, **environ: str) -> None:
        super().__init__()
        self._server = server
        self._folder = str(folder)
        self._environ = {**os.environ, "WARPWATCH_DIR": str(folder / "nowhere"), **environ}

    def __missing__(self, name: str) -> dict[str, Any]:
        process = self._server.fork(RUN, self._folder, name, environ=self._environ)
        output, errors = process.communicate()
        process.kill()
        assert process.returncode == 0, errors
        found = self[name] = json.loads(output)
        assert (found["loop"], found["faults"]) == (name, 0), found
        return dict(found)
