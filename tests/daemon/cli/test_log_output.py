"""What strangers can do to the daemon's log: neither fill it, nor forge a line of it."""

from __future__ import annotations

import io
import logging

import pytest

from tests.manual_clock import ManualClock
from warpwatch_daemon.log_output import LimitedHandler

FORGED = "x\n2026-01-01 00:00:00,000 ERROR root: forged\x1b[31m\u202egnp"


@pytest.fixture
def logged():
    """A logger, what it wrote, and its clock."""
    written, clock = io.StringIO(), ManualClock()
    handler = LimitedHandler(written, clock.monotonic)
    logger = logging.Logger("warpwatch_daemon.ranks.table")
    logger.addHandler(handler)
    yield logger, written, clock
    handler.close()


def test_the_first_lines_of_a_kind_are_written_and_the_others_counted(logged):
    logger, written, clock = logged
    for number in range(11_000):
        logger.warning("refused %s", f"file-{number}")
    logger.warning("of another kind")
    lines = written.getvalue().splitlines()
    assert len(lines) == 21
    assert lines[19].endswith("refused file-19")
    assert lines[20].endswith("of another kind")
    handler = logger.handlers[0]
    for later_s in (59.0, 1.0, 0.0):
        clock.advance(later_s)
        handler.report()
    lines = written.getvalue().splitlines()[21:]
    assert len(lines) == 1
    assert lines[0].endswith(
        " WARNING warpwatch_daemon.ranks.table: 10980 more lines in 60 s like: refused %s"
    )
    logger.warning("refused %s", "once more")
    assert written.getvalue().endswith("refused once more\n")


def test_a_hostile_text_is_part_of_its_one_line_and_cut(logged):
    logger, written, _ = logged
    logger.warning("refused %s", FORGED)
    logger.warning("refused %s", "long" * 10_000)
    lines = written.getvalue().splitlines()
    assert len(lines) == 2
    assert r"x\n2026-01-01 00:00:00,000 ERROR root: forged\x1b[31m\u202egnp" in lines[0]
    assert len(lines[1]) == 2_001


def test_no_line_of_a_traceback_looks_like_an_entry(logged):
    logger, written, _ = logged
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.exception("failed")
    first, *rest = written.getvalue().splitlines()
    assert first.endswith("failed")
    assert all(line.startswith("    ") for line in rest)
    assert r"forged\x1b[31m\u202egnp" in rest[-1]
