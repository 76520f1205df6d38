"""Fixtures for captures: a node with a job of two ranks."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.daemon.captures.capture_node import CaptureNode


@pytest.fixture
def node(tmp_path: Path, stack: ExitStack) -> CaptureNode:
    return CaptureNode(tmp_path, stack)
