"""Progress of long commands: bars on a real terminal, else lines, and never on standard output."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from warpwatch_daemon.cli.progress import Progress

LOG = "".join(
    json.dumps({"type": "step", "time": 1000.0 + number, "job": "j", "rank": 0, "step": number,
                "duration_s": 1.0}) + "\n"
    for number in range(4_000)
)  # fmt: skip


def replay(log: Path, stderr: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "warpwatch_daemon", "replay", str(log), "--json"]
    environment = os.environ | {"TERM": "xterm-256color"}
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=120, env=environment
    )


def test_a_terminal_sees_a_bar_and_the_output_is_the_same(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text(LOG)
    plain = replay(log, subprocess.PIPE)
    ours, theirs = pty.openpty()
    seen: list[bytes] = []

    def watch() -> None:
        # The terminal's end is an error of its own.
        with contextlib.suppress(OSError):
            while block := os.read(ours, 65536):
                seen.append(block)

    watcher = threading.Thread(target=watch)
    watcher.start()
    shown = replay(log, theirs)
    os.close(theirs)
    watcher.join()
    os.close(ours)
    assert (plain.stderr, plain.returncode) == ("", shown.returncode)
    assert plain.stdout == shown.stdout
    assert b"run.jsonl" in b"".join(seen) and b"%" in b"".join(seen)


def test_without_a_terminal_a_line_is_printed_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    often, seldom = Progress(interval_s=0.0), Progress(interval_s=1000.0)
    for progress in (often, seldom):
        progress.show("rank 0 on gpu-1", 2, 4, "recording")
        progress.show("rank 0 on gpu-1", 2, 4, "recording")
        progress.show("standard input", 5, 0)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == ["rank 0 on gpu-1: 50% recording", "standard input:"]


def test_without_rich_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    from warpwatch_daemon.cli.progress import progress

    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress() as shown:
        assert type(shown) is Progress
