"""A daemon whose bucket is away for a while, and which is killed meanwhile."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.history.object_store import URL, Bucket, bucket
from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.programs import STEPPING

pytestmark = pytest.mark.loops

PENDING = "warpwatch_uploads_pending"


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[Bucket]:
    with bucket(tmp_path / "buckets") as found:
        yield found


@pytest.fixture
def node(tmp_path: Path, s3: Bucket) -> Iterator[LoopNode]:
    with loop_node(tmp_path, remote_store={"url": URL}) as node:
        node.start_daemon(wait=True, **s3.environment)
        node.start_rank(0, STEPPING, "0.02", world_size=1)
        poll(lambda: node.get("ranks"), node.log("rank0"))
        yield node


def captured(node: LoopNode) -> Any:
    body = {"job": "stepping", "kind": "stacks"}
    asked = poll(lambda: node.http.post("/api/v1/captures", json=body), "a capture").json()

    def ended() -> Any:
        found = node.http.get(f"/api/v1/captures/{asked['id']}").json()
        return found if found["outcome"] else None

    capture = poll(ended, node.log("daemon"))
    assert capture["outcome"] == "complete"
    return capture


def test_what_was_captured_while_the_bucket_was_away_arrives_once_and_nothing_else(node, s3):
    s3.set("refuse")
    captures = [captured(node), captured(node)]
    poll(lambda: node.metric("warpwatch_uploads_total", what="capture", outcome="failed"), "a try")
    node.kill_daemon()
    node.start_daemon(wait=True, **s3.environment)
    poll(lambda: node.get("ranks"), node.log("daemon"))
    assert node.metric(PENDING, what="capture") == 2
    captures.append(captured(node))
    assert s3.objects() == []
    s3.set("pass")
    poll(lambda: node.metric(PENDING, what="capture") == 0, node.log("daemon"))
    addresses = {capture["id"]: capture["remote"] for capture in node.get("captures")}
    expected = [
        f"{addresses[capture['id']].removeprefix('s3://ours/')}{name}"
        for capture in captures
        for name in (*capture["files"], "capture.json", "manifest.json")
    ]
    assert s3.objects() == sorted(expected)
    written = [line for line in s3.seen if line.startswith("PUT")]
    manifests = [line for line in written if line.endswith("/manifest.json")]
    assert [capture["id"] in line for capture in captures for line in manifests].count(True) == 3
    assert {line.partition(" ")[0] for line in s3.seen} == {"PUT"}


def test_a_bucket_that_never_answers_delays_neither_captures_nor_the_end(node, s3):
    s3.set("silent")
    captured(node)
    poll(lambda: s3.seen, node.log("daemon"))
    # While that upload waits:
    captured(node)
    node.terminate_daemon()
    assert node.daemon.returncode == 0
    node.start_daemon(wait=True, **s3.environment)
    assert node.metric(PENDING, what="capture") == 2
