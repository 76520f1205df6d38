"""A node with ranks for each test, and processes that are seen there."""

import os
import subprocess
import sys

import pytest

from tests.daemon.ranks.sources import RankNode
from warpwatch_daemon.ranks.table import LIMITS


@pytest.fixture
def limits():
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


@pytest.fixture
def begin(node, stack):
    def begin(program: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "WARPWATCH_DIR": str(node.folder.path)},
        )  # fmt: skip
        stack.enter_context(process)
        stack.callback(process.kill)
        assert process.stdout.readline() == "running\n"
        return process

    return begin
