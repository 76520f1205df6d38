"""A rendezvous folder with a daemon's lock on it, and servers that fork programs with torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.client import fork_server
from tests.client.daemon_side import Folder
from tests.client.fork_server import ForkServer


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    found = Folder(tmp_path / "warpwatch")
    with found.held():
        yield found


@pytest.fixture(scope="session")
def with_torch() -> Iterator[ForkServer]:
    """A server without hooks."""
    with closing(fork_server.start()) as server:
        yield server


@pytest.fixture(scope="session")
def with_hooks() -> Iterator[ForkServer]:
    """A server under ``warpwatch run``, whose loops have the clock of loop_base.py."""
    with closing(fork_server.start("-m", "warpwatch", "run", "--", sys.executable)) as server:
        yield server
