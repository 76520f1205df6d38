"""``warpwatch demo`` as a newcomer runs it: the loop closes by itself for each fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loop.demo import demo

pytestmark = pytest.mark.torch


def test_a_data_stall_is_found_captured_and_diagnosed(tmp_path: Path) -> None:
    code, ending, story = demo("data_stall", tmp_path)
    assert code == 0, story
    assert ending["anomaly"]["kind"] == "data_stall"
    capture = ending["capture"]
    assert (capture["kind"], capture["outcome"], capture["ranks"]) == ("torch", "complete", 2)
    assert ending["diagnosis"]["verdict"] == "data_loading"
    # A busy machine may bring another anomaly meanwhile, with a capture of its own.
    (folder,) = tmp_path.rglob(capture["id"])
    assert len(list(folder.glob("rank*.pt.trace.json.gz"))) == 2


@pytest.mark.slow
def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    code, ending, story = demo("slow_rank", tmp_path)
    assert code == 0, story
    assert (ending["anomaly"]["kind"], ending["anomaly"]["rank"]) == ("straggler", 0)


@pytest.mark.slow
def test_a_hang_is_answered_with_stacks_and_who_waits_for_whom(tmp_path: Path) -> None:
    code, ending, story = demo("hang", tmp_path)
    assert code == 0, story
    assert ending["anomaly"]["kind"] == "hang"
    assert ending["capture"]["kind"] == "stacks"
    diagnosis = ending["diagnosis"]
    assert (diagnosis["verdict"], diagnosis["findings"]) == ("inconclusive", [])
    # Newer versions of torch number their collectives: "; rank 0 never entered all_reduce #812".
    assert diagnosis["summary"].partition(";")[0] == "rank 1 waits in all_reduce for rank 0"


@pytest.mark.slow
def test_a_regression_is_found(tmp_path: Path) -> None:
    code, ending, story = demo("regression", tmp_path)
    assert code == 0, story
    assert ending["anomaly"]["kind"] == "step_regression"


@pytest.mark.slow
def test_nothing_is_found_when_nothing_is_wrong(tmp_path: Path) -> None:
    code, ending, story = demo("none", tmp_path)
    if code == 1 and ending["anomaly"]["kind"] == "step_regression":
        # On a shared machine the steps can really become slower for a while; not twice, though.
        code, ending, story = demo("none", tmp_path)
    assert code == 0, story
    assert ending == {"fault": "none", "anomaly": None, "capture": None, "diagnosis": None}
