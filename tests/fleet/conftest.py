"""Agents of two nodes with two ranks each, which a fleet captures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fleet.capturing import PlayedAgent


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def agents(tmp_path: Path, stack: ExitStack) -> list[PlayedAgent]:
    return [
        PlayedAgent(tmp_path, stack, f"gpu-{number + 1}", range(2 * number, 2 * number + 2))
        for number in range(2)
    ]
