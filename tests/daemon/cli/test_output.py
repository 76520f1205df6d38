"""Output besides standard output: progress of long commands, and the daemon's log.

Strangers can neither fill that log, nor forge a line of it.
"""

import io
import logging

import pytest

from tests.manual_clock import ManualClock
from warpwatch_runtime.command_line import ProgressLines
from warpwatch_runtime.log_output import LimitedHandler


def test_a_line_of_progress_is_printed_each_five_seconds_if_there_is_news(capsys):
    clock = ManualClock()
    shown = ProgressLines(monotonic=clock.monotonic)
    for later_s in (4.5, 0.5, 5.0):
        clock.advance(later_s)
        shown.show("rank 0 on gpu-1", 2, 4, "recording")
    shown.show("standard input", 5, 0)
    shown.show("standard input", 6, 0)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == ["rank 0 on gpu-1: 50% recording", "standard input:"]


FORGED = "x\n2026-01-01 00:00:00,000 ERROR root: forged\x1b[31m\u202egnp"


@pytest.fixture
def logged():
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
    for later_s, count in ((59.0, 21), (1.0, 22), (0.0, 22)):
        clock.advance(later_s)
        handler.report()
        lines = written.getvalue().splitlines()
        assert len(lines) == count
    assert lines[21].endswith(
        " WARNING warpwatch_daemon.ranks.table: 10980 more lines in 60 s like: refused %s"
    )
    logger.warning("refused %s", "once more")
    assert written.getvalue().endswith("refused once more\n")
    for length in range(1_100):
        logger.warning("x" * length)
    # Each of 1,000 kinds has its 20 lines, and the others have 20 together.
    assert len(written.getvalue().splitlines()) == 22 + 1000 + 20


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
