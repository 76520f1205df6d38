"""What tests of the daemon begin with: what is closed after a test, and a rendezvous folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.daemon.ranks.sources import ranks_source
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.source import RanksSource


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RendezvousFolder]:
    folder = RendezvousFolder(tmp_path / "run", tmp_path / "inbox", "0.0.0")
    yield folder
    folder.close()


@pytest.fixture
def rejects() -> Counter[str]:
    return Counter()


@pytest.fixture
def source(folder: RendezvousFolder, rejects: Counter[str]) -> RanksSource:
    return ranks_source(folder, lambda reason: rejects.update([reason]))
