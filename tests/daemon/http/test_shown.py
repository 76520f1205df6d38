"""What a daemon shows of a node with everything in it, compared with golden files."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import pytest

from tests.daemon.http.conftest import NOW, MemoryAgent
from tests.daemon.http.everything import fill
from warpwatch_daemon.cli import status
from warpwatch_daemon.cli.capture import describe

Golden = Callable[[str, bytes], None]


@pytest.fixture
def full(agent: MemoryAgent) -> MemoryAgent:
    fill(agent)
    return agent


def test_the_page_is_the_golden_one(
    client: httpx.Client, full: MemoryAgent, golden: Golden
) -> None:
    full.runs = []
    page = client.get("/").text
    page = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    golden("http/page.html", page.encode())


def test_what_commands_print_is_the_golden_text(
    client: httpx.Client,
    full: MemoryAgent,
    golden: Golden,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status.main([], lambda: NOW) == 1
    shown = client.get("/api/v1/captures").json()["captures"]
    text = capsys.readouterr().out
    text += "\n".join(describe(capture, "http://localhost:9400") for capture in shown)
    golden("http/commands.txt", text.encode())
