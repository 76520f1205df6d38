"""The path of captures in stories, with played participants: each move, and what comes of it."""

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.capturing.played import Story
from tests.cases import cases

CASES = cases(__file__)


@pytest.mark.parametrize(
    ("place", "name"), [(place, name) for place in CASES for name in CASES[place]]
)
def test_a_story_of_captures_is_golden(
    tmp_path: Path,
    golden_case: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
    name: str,
) -> None:
    monkeypatch.setattr("random.uniform", lambda least, most: (least + most) / 2)
    played = Story(tmp_path, is_local=place == "node")
    log = logging.getLogger("warpwatch_capturing")
    caplog.set_level(logging.INFO, log.name)
    log.addHandler(played)
    try:
        golden_case(played.told(CASES[place][name].splitlines()), name)
    finally:
        log.removeHandler(played)
