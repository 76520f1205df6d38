"""A rendezvous folder with a daemon's lock on it, and servers that fork programs with torch."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.client import fork_server
from tests.client.daemon_side import Folder
from tests.client.fork_server import ForkServer, Loops
from tests.client.training import PROFILES, Training, training
from tests.manual_clock import ManualClock
from warpwatch import iterations, monitor, protocol, steps
from warpwatch.hooks import hook_state
from warpwatch.ring import RingWriter


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    found = Folder(tmp_path / "warpwatch")
    with found.held():
        yield found


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[RingWriter]:
    path = tmp_path / "test.ring"
    path.write_bytes(bytes(protocol.RING_SIZE))
    found = RingWriter(os.open(path, os.O_RDWR), "test")
    yield found
    found.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The clock of the shim's hot path, where it is called by name: an argument would cost a step.

    Each call takes a microsecond: of borders at the same time the GPU's events are the same.
    """
    found = ManualClock()

    def monotonic_ns() -> int:
        found.advance(1e-6)
        return round(found.monotonic() * 1e9)

    for module in (hook_state, iterations, monitor, steps):
        monkeypatch.setattr(module, "monotonic_ns", monotonic_ns)
    return found


@pytest.fixture(scope="session")
def with_torch() -> Iterator[ForkServer]:
    with closing(fork_server.start()) as server:
        yield server


@pytest.fixture(scope="session")
def with_hooks() -> Iterator[ForkServer]:
    """A server under ``warpwatch run``, whose loops have the clock of loop_base.py."""
    with closing(fork_server.start("-m", "warpwatch", "run", "--", sys.executable)) as server:
        yield server


@pytest.fixture(scope="session")
def compiling(with_torch: ForkServer) -> Iterator[ForkServer]:
    with closing(with_torch.importing(*fork_server.COMPILER)) as server:
        yield server


@pytest.fixture(scope="session")
def compiling_with_hooks(with_hooks: ForkServer) -> Iterator[ForkServer]:
    with closing(with_hooks.importing(*fork_server.COMPILER)) as server:
        yield server


@pytest.fixture(scope="session")
def plain_and_observed(
    compiling: ForkServer,
    compiling_with_hooks: ForkServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[Loops]]:
    folder = tmp_path_factory.mktemp("loops")
    with closing(compiling.importing(*fork_server.LOOPS, WARPWATCH="0")) as plain:
        yield [Loops(plain, folder, WARPWATCH="0"), Loops(compiling_with_hooks, folder)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, with_torch: ForkServer) -> Iterator[Training]:
    """One training for several tests; each has captures of its own."""
    folder = Folder(tmp_path_factory.mktemp("node") / "warpwatch")
    with folder.held(), training(folder, with_torch, PROFILES) as found:
        yield found
