"""A torchrun job over three nodes, a fleet and a bucket: one fault, one capture, one diagnosis.

test_bus.py has a hang of such a job.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.history.object_store import URL, Bucket, bucket
from tests.loop.cluster import LoopCluster, loop_cluster
from tests.loop.node import ROOT, poll
from tests.loop.over_nodes import NODES, captured_straggler
from tests.loop.trainings import ON_A_BUSY_MACHINE

pytestmark = [pytest.mark.loops, pytest.mark.torch]


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[Bucket]:
    with bucket(tmp_path / "buckets") as found:
        yield found


@pytest.fixture
def cluster(tmp_path: Path, s3: Bucket) -> Iterator[LoopCluster]:
    remote = {"url": URL}
    with loop_cluster(tmp_path, 3, detection=ON_A_BUSY_MACHINE, remote_store=remote) as cluster:
        cluster.start(**s3.environment)
        yield cluster


def test_a_straggler_over_three_nodes_is_captured_whole_and_diagnosed_as_one(cluster, s3):
    capture = captured_straggler(cluster)
    assert {one["first_step"] for one in capture["ranks"]} == {capture["start_step"]}
    # A file of an agent, through the fleet.
    address = f"/api/v1/captures/{capture['id']}"
    trace = cluster.http.get(f"{address}/{capture['ranks'][4]['file']}")
    (on_disk,) = (
        path
        for path in (cluster.nodes[2].folder / "captures").rglob(capture["ranks"][4]["file"])
        if path.parent.name.startswith(capture["id"])
    )
    assert trace.content == on_disk.read_bytes()

    poll(lambda: cluster.http.get(address).json()["remote"], cluster.log)
    remote = cluster.http.get(address).json()["remote"]
    below = remote.removeprefix("s3://ours/")
    names = {one.removeprefix(below) for one in s3.objects() if one.startswith(below)}
    own = {"capture.json", "diagnosis.json", "manifest.json", "report.html"}
    own |= {f"rank{rank}.reduction.gz" for rank in range(6)}
    assert own <= names
    for rank, node in enumerate(NODES):
        assert f"nodes/{node}/rank{rank}.pt.trace.json.gz" in names
        assert f"nodes/{node}/manifest.json" in names
    told = subprocess.run(
        [sys.executable, "-m", "warpwatch_daemon", "diagnose", remote, "--json"], cwd=ROOT,
        env=os.environ | s3.environment, capture_output=True, check=False,
    )  # fmt: skip
    again = json.loads(told.stdout)
    keys = ("verdict", "summary", "findings")
    assert [again[key] for key in keys] == [capture["diagnosis"][key] for key in keys]
