"""What strangers can do to the daemon's log: neither fill it, nor forge a line of it."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.loop.node import LoopNode, poll
from warpwatch_daemon.log_output import LimitedHandler

FORGED = "x\n2026-01-01 00:00:00,000 ERROR root: forged\x1b[31m\u202egnp"


@pytest.fixture
def logged() -> Iterator[tuple[logging.Logger, io.StringIO, list[float]]]:
    """A logger, what it wrote, and the clock: a list with the time in seconds."""
    written, clock = io.StringIO(), [0.0]
    handler = LimitedHandler(written, lambda: clock[0])
    logger = logging.Logger("warpwatch_daemon.ranks.table")
    logger.addHandler(handler)
    yield logger, written, clock
    handler.close()


def test_the_first_lines_of_a_kind_are_written_and_the_others_counted(
    logged: tuple[logging.Logger, io.StringIO, list[float]],
) -> None:
    logger, written, clock = logged
    for number in range(11_000):
        logger.warning("refused %s", f"file-{number}")
    logger.warning("of another kind")
    lines = written.getvalue().splitlines()
    assert len(lines) == 21
    assert lines[19].endswith("refused file-19")
    assert lines[20].endswith("of another kind")
    clock[0] = 60.0
    handler = logger.handlers[0]
    assert isinstance(handler, LimitedHandler)
    handler.report()
    handler.report()
    lines = written.getvalue().splitlines()[21:]
    assert len(lines) == 1
    assert lines[0].endswith(
        " WARNING warpwatch_daemon.ranks.table: 10980 more lines in 60 s like: refused %s"
    )
    logger.warning("refused %s", "once more")
    assert written.getvalue().endswith("refused once more\n")


def test_a_hostile_text_is_part_of_its_one_line_and_cut(
    logged: tuple[logging.Logger, io.StringIO, list[float]],
) -> None:
    logger, written, _ = logged
    logger.warning("refused %s", FORGED)
    logger.warning("refused %s", "long" * 10_000)
    lines = written.getvalue().splitlines()
    assert len(lines) == 2
    assert r"x\n2026-01-01 00:00:00,000 ERROR root: forged\x1b[31m\u202egnp" in lines[0]
    assert len(lines[1]) == 2_001


def test_no_line_of_a_traceback_looks_like_an_entry(
    logged: tuple[logging.Logger, io.StringIO, list[float]],
) -> None:
    logger, written, _ = logged
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.exception("failed")
    first, *rest = written.getvalue().splitlines()
    assert first.endswith("failed")
    assert all(line.startswith("    ") for line in rest)
    assert r"forged\x1b[31m\u202egnp" in rest[-1]


@contextmanager
def renaming(folder: Path) -> Iterator[None]:
    """Two hundred files that are no rings have other names each time the folder is looked at."""
    done = threading.Event()

    def rename() -> None:
        paths = [folder / f"no-ring-{number}-0" for number in range(200)]
        for path in paths:
            path.touch()
        turn = 0
        while not done.wait(0.05):
            turn += 1
            paths = [path.rename(folder / f"no-ring-{n}-{turn}") for n, path in enumerate(paths)]

    thread = threading.Thread(target=rename)
    thread.start()
    yield
    done.set()
    thread.join()


def test_renamed_files_and_a_job_with_a_hostile_name_write_few_lines_and_none_of_their_own(
    tmp_path: Path,
) -> None:
    node = LoopNode(tmp_path)
    try:
        node.start_daemon()
        before = len(node.log("daemon").splitlines())
        with renaming(node.run_dir / "ranks"):
            node.http.post("/api/v1/captures", json={"job": FORGED, "kind": "stacks"}, timeout=5.0)
            time.sleep(5.0)
            poll(lambda: refused(node) >= 400, "two looks at the renamed files")
        lines = node.log("daemon").splitlines()[before:]
        assert 20 <= len(lines) <= 40
        assert all(line[:4].isdigit() and line.isprintable() for line in lines), lines
    finally:
        node.close()


def refused(node: LoopNode) -> float:
    return node.metric("warpwatch_rendezvous_rejected_total", reason="bad_name") or 0.0
