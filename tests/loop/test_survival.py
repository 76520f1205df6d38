"""The job comes first: what kills the daemon or a rank costs no other anything."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.programs import SEEDED, STEPPING
from tests.waiting import DEADLINE_S

KILLS = 20
SEEDED_RANK = {"training_job": "seeded", "rank": "1"}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoopNode]:
    with loop_node(tmp_path, detection={"hang": {"timeout_s": 8}}) as node:
        yield node


def uncounted(node: LoopNode) -> float:
    """Steps of the totals that are in no bucket: those before the daemon gave the rank a ring."""
    totals = node.metric("warpwatch_steps_total", **SEEDED_RANK)
    buckets = node.metric("warpwatch_step_duration_seconds_count", **SEEDED_RANK)
    assert totals is not None
    assert buckets is not None
    return totals - buckets


@pytest.mark.loops
@pytest.mark.torch
def test_twenty_kills_of_the_daemon_are_never_noticed_and_lose_no_count(node):
    steps = 3000
    plain = node.start_rank(0, SEEDED, str(steps), world_size=1, WARPWATCH="0")
    node.start_daemon()
    watched = node.start_rank(1, SEEDED, str(steps), world_size=2)
    poll(lambda: node.steps("seeded"), "the rank reports")
    before_ring = uncounted(node)
    choose = random.Random(20)
    for _ in range(KILLS):
        node.lets_pass(choose.uniform(0.05, 0.4))
        node.kill_daemon()
        node.start_daemon(wait=choose.random() < 0.7)
        if node.daemon and choose.random() < 0.5:
            node.lets_pass(choose.uniform(0.0, 0.3))
    assert watched.wait(DEADLINE_S) == 0, node.log("rank1")
    assert plain.wait(DEADLINE_S) == 0, node.log("rank0")
    said, alone = (json.loads(node.log(name).splitlines()[-1]) for name in ("rank1", "rank0"))
    assert said["losses"] == alone["losses"]
    assert said["dearest_ms"] < 5
    poll(lambda: node.steps("seeded") == [steps], f"{steps} steps are counted")
    assert node.metric("warpwatch_steps_total", **SEEDED_RANK) == steps
    assert node.metric("warpwatch_samples_total", **SEEDED_RANK) == 32 * steps
    # One step may have been between its record and its total when the first page was made.
    assert abs(uncounted(node) - before_ring) <= 1


def test_the_trainer_may_come_first_and_the_daemon_later(node):
    node.start_rank(0, STEPPING, "0.01", world_size=1)
    poll(lambda: "step 50" in node.log("rank0"), "the trainer steps")
    node.start_daemon()
    # A new ring is there for a moment before its first totals are.
    poll(lambda: any(node.steps("stepping")), "the rank reports")
    (steps,) = node.steps("stepping")
    assert steps >= 50, "the steps before the daemon came are in the totals"


def test_a_second_daemon_on_the_folder_exits_2_and_names_the_first(node, tmp_path):
    daemon = node.start_daemon()
    (tmp_path / "second").mkdir()
    second = LoopNode(tmp_path / "second", rendezvous={"dir": str(node.run_dir)})
    assert second.start_daemon(wait=False).wait(DEADLINE_S) == 2
    assert f"pid {daemon.pid}" in second.log("daemon")
    second.close()
