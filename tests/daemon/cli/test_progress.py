"""Progress of long commands: bars on a real terminal, else lines, and never on standard output."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import sys
import threading

import pytest

from tests.manual_clock import ManualClock
from tests.waiting import eventually
from warpwatch_daemon.cli import main
from warpwatch_daemon.cli.progress import Progress, progress

LOG = "".join(
    json.dumps({"type": "step", "time": 1000.0 + number, "job": "j", "rank": 0, "step": number,
                "duration_s": 1.0 if number < 600 else 2.0}) + "\n"
    for number in range(1_000)
)  # fmt: skip


@pytest.fixture
def terminal():
    """A terminal's two ends: a file that programs write to, and what has been written so far."""
    ours, theirs = pty.openpty()
    seen: list[bytes] = []

    def watch() -> None:
        # The terminal's end is an error of its own.
        with contextlib.suppress(OSError):
            while block := os.read(ours, 65536):
                seen.append(block)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with open(theirs, "w") as file:
        yield file, seen
        file.close()
        watcher.join()
        os.close(ours)


def test_a_terminal_sees_a_bar_and_the_output_is_the_same(tmp_path, capsys, monkeypatch, terminal):
    log = tmp_path / "run.jsonl"
    log.write_text(LOG)
    code = main(["replay", str(log), "--json"])
    plain = capsys.readouterr()
    file, seen = terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        assert main(["replay", str(log), "--json"]) == code
    assert plain.err == ""
    assert plain.out == capsys.readouterr().out != ""
    eventually(lambda: b"run.jsonl" in b"".join(seen) and b"%" in b"".join(seen))


def test_without_a_terminal_a_line_is_printed_each_five_seconds_if_there_is_news(capsys):
    clock = ManualClock()
    shown = Progress(monotonic=clock.monotonic)
    for later_s in (4.5, 0.5, 5.0):
        clock.advance(later_s)
        shown.show("rank 0 on gpu-1", 2, 4, "recording")
    shown.show("standard input", 5, 0)
    shown.show("standard input", 6, 0)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == ["rank 0 on gpu-1: 50% recording", "standard input:"]


def test_without_rich_there_are_lines(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress() as shown:
        assert type(shown) is Progress
