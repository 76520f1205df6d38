"""A node with ranks for each test."""

from __future__ import annotations

import pytest

from tests.daemon.ranks.sources import RankNode
from warpwatch_daemon.ranks.table import LIMITS


@pytest.fixture
def limits():
    """Limits of the node; tests give others as a parameter."""
    return LIMITS


@pytest.fixture
def known_pods():
    """The pods that the kubelet has, asked at each poll; None where no kubelet is asked."""
    return None


@pytest.fixture
def node(tmp_path, limits, known_pods):
    node = RankNode(tmp_path, limits, known_pods)
    yield node
    node.close()
