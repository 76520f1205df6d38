"""How a program of a stand-in server waits for the daemon and ends."""

import os

from tests.client.daemon_side import Folder, Ring, program
from tests.client.fork_server import ROOT

BOOTSTRAP = ROOT / "client/warpwatch/bootstrap"
SERVERS = ROOT / "tests/client/servers"
# Without the daemon's ring a record would not be written; its file is there a moment earlier.
WAITS = """
import time
while (known := sys.modules["warpwatch.attach"]._monitor) is None or known.clock.ring is None:
    time.sleep(0.01)
"""
ENDS = """
print("served", flush=True)
sys.stdin.readline()
"""


def ended(folder: Folder, code: str, *arguments: str, lines: int = 0, **environ: str) -> Ring:
    """Return the ring of a program that printed so many lines before it served."""
    path = os.pathsep.join((str(BOOTSTRAP), str(SERVERS)))
    with program(folder, code + WAITS + ENDS, *arguments, PYTHONPATH=path, **environ) as process:
        printed = [process.stdout.readline() for _ in range(lines + 1)]
        assert printed[-1] == "served\n", process.stderr.read()
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait()
    return folder.ring()
