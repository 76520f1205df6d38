"""A rendezvous folder with a daemon's lock on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.daemon_side import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    found = Folder(tmp_path / "warpwatch")
    with found.held():
        yield found
