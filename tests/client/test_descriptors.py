"""A descriptor that the program closed and whose number is another file's is left alone."""

from __future__ import annotations

import os
from pathlib import Path

from tests.client.daemon_side import Folder, Ring
from tests.client.training import training
from tests.waiting import eventually
from warpwatch.descriptors import Descriptor

CLOSES_ALL = """
first = monitor.clock.ring
os.closerange(3, 100)
mine = [os.open({path!r}, os.O_RDWR | os.O_CREAT) for _ in range(20)]
# The helper thread closes the old ring's files at once, not seconds later.
helper_thread.RETIRE_AFTER_S = 0.0
"""
NEW_RING = "wait(lambda: monitor.clock.ring not in (None, first))"
CLOSED = """
wait(lambda: not sys.modules["warpwatch.attach"]._helper._retired)
first.close()
assert [os.fstat(fd).st_ino for fd in mine] == [os.stat({path!r}).st_ino] * 20
assert os.path.getsize({path!r}) == 0
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


def test_a_program_that_closes_everything_gets_another_ring(folder: Folder, tmp_path: Path) -> None:
    path = str(tmp_path / "mine")
    with training(folder) as found:
        first = folder.ring().name
        found.steps(1, CLOSES_ALL.format(path=path))
        found.steps(1, NEW_RING)
        found.steps(1, CLOSED.format(path=path))
        (new,) = (ring.name for ring in folder.rings() if ring.name != first)
        ring = folder.path / "ranks" / f"{new}.ring"
        eventually(lambda: Ring(ring).header.totals.steps == found.number)
