"""Workflows run what was reviewed: every action by its commit, never by a tag that can move."""

import re
from pathlib import Path

import pytest

WORKFLOWS = sorted((Path(__file__).resolve().parents[2] / ".github/workflows").glob("*.yaml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_by_commit(path):
    uses = re.findall(r"uses: *(.+)", path.read_text())
    assert uses
    assert [one for one in uses if not re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+", one)] == []
