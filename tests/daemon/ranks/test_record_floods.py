"""Users whose rings fill faster than a daemon can read cost it a bounded share of a core."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.ranks.flooding import flood, whole_ring
from tests.daemon.ranks.ring_files import RingFile
from tests.loop.node import LoopNode, loop_node, poll
from warpwatch import protocol
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.record_budget import fair_shares
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_telemetry.records import Step

MEASURED_S = 5.0
MAX_CORES = 0.35
STEPS_PER_S = 10
HANG_TIMEOUT_S = 6.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoopNode]:
    node = LoopNode(tmp_path)
    node.start_daemon()
    yield node
    node.close()


@contextmanager
def honest_rank(node: LoopNode, hangs: threading.Event | None = None) -> Iterator[RingFile]:
    """A rank of the daemon's own user that makes ten steps a second until it ``hangs``."""
    ring = RingFile(node.run_dir / "ranks", job="honest")
    done = threading.Event()

    def train() -> None:
        while not done.wait(1 / STEPS_PER_S):
            ring.heartbeat()
            if hangs is None or not hangs.is_set():
                ring.step()

    thread = threading.Thread(target=train)
    with ring.held():
        thread.start()
        try:
            yield ring
        finally:
            done.set()
            thread.join()


def cores(node: LoopNode, seconds: float) -> float:
    """The daemon's processor time a second."""
    begun, before_s = time.monotonic(), node.processor_s()
    time.sleep(seconds)
    return (node.processor_s() - before_s) / (time.monotonic() - begun)


def honest_steps(node: LoopNode) -> float:
    return node.metric("warpwatch_steps_total", job="honest") or 0.0


def hangs_of(node: LoopNode, job: str) -> list[Any]:
    found = node.get("anomalies")
    return [one for one in found if (one["kind"], one["job"]) == ("hang", job)]


@pytest.mark.parametrize(("kind", "count"), [("records", 8), ("counts", 60)])
def test_flooded_rings_cost_a_bounded_share_of_a_core_and_no_honest_step(
    node: LoopNode, kind: str, count: int
) -> None:
    with honest_rank(node) as ring, flood(node, 12_345, kind, count):
        poll(lambda: honest_steps(node) > 0, node.log("daemon"))
        used = cores(node, MEASURED_S)
        made, begun = ring.steps, time.monotonic()
        poll(lambda: honest_steps(node) >= made, node.log("daemon"))
        delay_s = time.monotonic() - begun
        rejected = node.metric("warpwatch_rendezvous_rejected_total", reason="too_many_records")
        named = node.log("daemon").count("more records than are read")
        lost = node.metric("warpwatch_records_lost_total", job="honest")
    assert used <= MAX_CORES
    assert delay_s <= 2.0
    assert rejected and rejected >= count
    assert 1 <= named <= count
    assert lost == 0.0


def test_a_rank_that_hangs_beside_floods_is_found_in_time(tmp_path: Path) -> None:
    hangs = threading.Event()
    with loop_node(tmp_path, detection={"hang": {"timeout_s": HANG_TIMEOUT_S}}) as node:
        node.start_daemon()
        floods = flood(node, 12_345, "records", 8), flood(node, 12_346, "counts", 60)
        with honest_rank(node, hangs), floods[0], floods[1]:
            poll(lambda: honest_steps(node) > 50, node.log("daemon"))
            hangs.set()
            hung_at = time.time()
            (hang,) = poll(lambda: hangs_of(node, "honest"), node.log("daemon"))
            assert hangs_of(node, "flood-records") == []
    assert hang["time"] < hung_at + HANG_TIMEOUT_S + 2.0
    assert time.time() < hung_at + HANG_TIMEOUT_S + 5.0
    assert hang["step"] >= 50


def test_of_a_flood_a_bounded_number_of_records_is_read_and_every_step_of_an_honest_rank(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    honest = RingFile(folder.ranks, job="honest")
    floods = [RingFile(folder.ranks, job="flood", rank=rank) for rank in range(2)]
    read: Counter[str] = Counter()
    with honest.held(), floods[0].held(), floods[1].held():
        for turn in range(25):
            honest.step()
            for ring in floods:
                ring.put(protocol.HEADER_SIZE, whole_ring(turn))
                ring.word(protocol.WORD_RECORDS, (turn + 1) * protocol.RECORD_COUNT)
            records = source.poll(time.time(), 0.2 * turn)
            read.update(record.job for record in records if isinstance(record, Step))
    # 12,000 at once and 4,000 a second, of the 102,400 that were written.
    assert read["flood"] <= 12_000 + 4_000 * 5
    assert read["honest"] == 25


def test_who_asks_for_little_gets_it_and_the_others_share_what_is_left() -> None:
    assert fair_shares({"flood": 2048, "honest": 3, "other": 400}, 300) == {
        "honest": 3,
        "other": 148,
        "flood": 149,
    }
    assert fair_shares({"flood": 2048, "honest": 3}, 0) == {"honest": 0, "flood": 0}
    assert fair_shares({"a": 1, "b": 2}, 1000) == {"a": 1, "b": 2}
