"""``warpwatch demo`` as a newcomer runs it: the loop closes by itself, fault after fault."""

import pytest

from tests.loop.demo import demo

pytestmark = [pytest.mark.loops, pytest.mark.torch]


def test_all_faults_are_found_captured_and_diagnosed_and_nothing_where_nothing_is_wrong(tmp_path):
    code, endings, story = demo(tmp_path)
    assert code == 0, story
    stall, slow_rank, regression, hang, none = endings["runs"]
    found = [run["anomaly"]["kind"] for run in (stall, slow_rank, regression, hang)]
    assert found == ["data_stall", "straggler", "step_regression", "hang"]
    assert none["anomaly"] is None
    assert slow_rank["anomaly"]["rank"] == 0
    capture = stall["capture"]
    assert (capture["kind"], capture["outcome"], capture["ranks"]) == ("torch", "complete", 2)
    assert stall["diagnosis"]["verdict"] == "data_loading"
    # A busy machine may bring another anomaly meanwhile, with a capture of its own.
    (folder,) = tmp_path.rglob(capture["id"])
    assert len(list(folder.glob("rank*.pt.trace.json.gz"))) == 2
    assert hang["capture"]["kind"] == "stacks"
    assert hang["diagnosis"]["verdict"] == "late_rank"
    # Newer versions of torch number their collectives: "; rank 0 never entered all_reduce #812".
    said = hang["diagnosis"]["summary"].partition(";")[0]
    assert said == "rank 1 waits in all_reduce for rank 0"


def test_a_slow_rank_of_a_job_over_three_nodes_is_one_anomaly_with_one_report(tmp_path):
    code, ending, story = demo(tmp_path, "slow_rank", nodes=3)
    assert code == 0, story
    anomaly, capture = ending["anomaly"], ending["capture"]
    assert (anomaly["rank"], anomaly["node"], anomaly["judged_by"]) == (0, "gpu-1", "fleet")
    assert (capture["outcome"], capture["ranks"]) == ("complete", 6)
    assert "rank 0" in ending["diagnosis"]["summary"]
    (report,) = tmp_path.rglob("report.html")
    assert report.parent.name == capture["id"]
