"""A descriptor that the program closed and whose number is another file's is left alone."""

from __future__ import annotations

import os
from pathlib import Path

from tests.client.daemon_side import Folder, eventually, program
from tests.client.training import running
from warpwatch.descriptors import Descriptor

CLOSES_ALL = """
import os, sys, time
import warpwatch
monitor = warpwatch.attach(job="demo")
def train(ready):
    while not ready():
        with monitor.step():
            time.sleep(0.005)
train(lambda: monitor.clock.ring is not None and monitor.clock.ring.command_fd >= 0)
os.closerange(3, 100)
mine = [os.open(sys.argv[1], os.O_RDWR | os.O_CREAT) for _ in range(20)]
end = time.monotonic() + 2.0
first = monitor.clock.ring
train(lambda: monitor.clock.ring not in (None, first) and time.monotonic() > end)
first.close()
print([os.fstat(fd).st_ino for fd in mine] == [os.stat(sys.argv[1]).st_ino] * 20)
print(os.path.getsize(sys.argv[1]), flush=True)
train(lambda: False)
"""


def test_a_number_that_is_another_file_is_not_closed(tmp_path: Path) -> None:
    path = tmp_path / "ours"
    # Before ours is gone: a file system uses numbers of files again as well.
    (tmp_path / "other").touch()
    ours = Descriptor(os.open(path, os.O_RDWR | os.O_CREAT))
    assert ours.links() == 1
    path.unlink()
    assert ours.links() == 0
    os.close(ours.fd)
    assert ours.links() is None
    other = os.open(tmp_path / "other", os.O_RDWR)
    assert other == ours.fd
    assert ours.links() is None
    ours.close()
    os.fstat(other)
    os.close(other)


def test_a_program_that_closes_everything_keeps_its_files_and_gets_another_ring(
    folder: Folder, tmp_path: Path
) -> None:
    (folder.path / "commands").mkdir(exist_ok=True)
    with program(folder, CLOSES_ALL, str(tmp_path / "mine")) as process:
        first = running(folder).name
        folder.command(first, op="cancel", id="x")
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert process.stdout.readline() == "0\n"
        rings = eventually(lambda: [ring for ring in folder.rings() if ring.name != first])
        steps = rings[0].header.totals.steps
        eventually(lambda: _steps(folder, rings[0].name) > steps)


def _steps(folder: Folder, name: str) -> int:
    return next(ring.header.totals.steps for ring in folder.rings() if ring.name == name)
