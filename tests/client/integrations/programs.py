"""Programs that train, and what the ring says of them before they end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.client.daemon_side import ROOT, Folder, Ring, eventually

RUN = ("-m", "warpwatch", "run", "--", sys.executable)
# The program stays until its standard input is closed, so that the helper thread write all.
# It runs once for each argument.
STAY = """
import runpy, sys
script, *arguments = sys.argv[1:]
for argument in arguments:
    sys.argv = [script, argument]
    runpy.run_path(script, run_name="__main__")
print("trained", flush=True)
sys.stdin.read()
"""


def report(
    folder: Folder, script: Path, *arguments: str, run: bool, reported: Callable[[Ring], bool]
) -> Ring:
    """The ring of ``script`` when it has trained with each of the arguments and ``reported`` holds.

    ``run``: under our launcher.
    """
    environ = folder.environment(
        HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT / "client")
    )
    command = [sys.executable, *(RUN if run else ()), "-c", STAY, str(script), *arguments]
    with subprocess.Popen(
        command,
        env=environ,
        cwd=folder.path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            if "trained\n" not in lines:
                raise AssertionError(process.communicate(timeout=60)[1])
            return eventually(lambda: next(filter(reported, folder.rings()), None))
        finally:
            process.kill()
