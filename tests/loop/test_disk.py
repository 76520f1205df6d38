"""A disk that is full, or hangs: captures are refused or late, and everything else goes on."""

from pathlib import Path
from typing import Any

from tests.loop.hung_disk import HungDisk, small_disk
from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.programs import STEPPING, STEPPING_UNTIL


def test_a_store_without_space_refuses_captures_and_everything_else_goes_on(tmp_path):
    with (
        small_disk(tmp_path / "disk", "1m") as disk,
        loop_node(tmp_path, store={"url": disk.as_uri()}) as node,
    ):
        (disk / "filler").write_bytes(bytes(1 << 20))
        node.start_daemon()
        node.start_rank(0, STEPPING, "0.01", world_size=1)
        poll(lambda: node.get("ranks"), "the rank reports")
        answer = node.http.post("/api/v1/captures", json={"job": "stepping", "kind": "stacks"})
        assert answer.status_code in (409, 503, 507)
        assert answer.json()["error"]["reason"] == "refused_disk"
        labels = {"kind": "stacks", "trigger": "manual", "outcome": "refused_disk"}
        assert node.metric("warpwatch_captures_total", **labels) == 1
        assert "Traceback" not in node.log("daemon")


def test_a_store_that_hangs_keeps_no_step_and_no_anomaly_from_being_seen(tmp_path):
    hung = HungDisk(tmp_path, tmp_path / "captures")
    fails = tmp_path / "fails"
    log = tmp_path / "captures" / "log.jsonl"
    log.parent.mkdir()
    with loop_node(tmp_path, exporters={"jsonl": {"path": str(log)}}) as node:
        node.start_daemon(wait=True, **hung.environment)
        node.start_rank(0, STEPPING_UNTIL, "failing", str(fails), "fails", world_size=1)
        node.have_trained("failing", 1, 5)
        with hung.hanging():
            asked = node.http.post("/api/v1/captures", json={"job": "failing", "kind": "stacks"})
            assert asked.status_code == 202
            # The log, and one look at the store before the capture's folder is made.
            poll(lambda: {"write", "stat64"} <= hung.waiting_calls(), "both wait for the disk")
            poll(lambda: state_of(node) == "exported", "the rank has answered")
            (seen,) = node.steps("failing")
            node.have_trained("failing", 1, seen + 5)
            fails.touch()
            poll(lambda: node.get("anomalies"), "the crash is found")
            (found,) = node.get("anomalies")
            assert (found["kind"], found["job"]) == ("crash", "failing")
            assert node.get("captures")[0]["outcome"] is None
        (capture,) = poll(node.ended, "the capture ends")
        assert capture["outcome"] == "complete"
        assert (Path(capture["folder"]) / "capture.json").exists()
        poll(lambda: '"exception"' in log.read_text(), "the log has what came meanwhile")


def state_of(node: LoopNode) -> Any:
    return node.get("captures")[0]["ranks"][0]["state"]
