"""The daemon's log, of which strangers cannot forge a line."""

import io
import logging

import pytest

from warpwatch_runtime.log_output import LimitedHandler

FORGED = "x\n2026-01-01 00:00:00,000 ERROR root: forged\x1b[31m\u202egnp"


@pytest.fixture
def logged():
    written = io.StringIO()
    handler = LimitedHandler(written)
    logger = logging.Logger("warpwatch_daemon.ranks.table")
    logger.addHandler(handler)
    yield logger, written
    handler.close()


def test_a_hostile_text_is_part_of_its_one_line_and_cut(logged):
    logger, written = logged
    logger.warning("refused %s", FORGED)
    logger.warning("refused %s", "long" * 10_000)
    lines = written.getvalue().splitlines()
    assert len(lines) == 2
    assert r"x\n2026-01-01 00:00:00,000 ERROR root: forged\x1b[31m\u202egnp" in lines[0]
    assert len(lines[1]) == 2_001


def test_no_line_of_a_traceback_looks_like_an_entry(logged):
    logger, written = logged
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.exception("failed")
    first, *rest = written.getvalue().splitlines()
    assert first.endswith("failed")
    assert all(line.startswith("    ") for line in rest)
    assert r"forged\x1b[31m\u202egnp" in rest[-1]
