"""Acceptance: faults of a real vLLM server are found, captured and explained while it serves.

Forward passes wait for 0.1 s, as the processor is shared (vllm_faults.py). Each fault has a server
of its own, which is well until its detector would see the fault.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.vllm_server import MARKS, Server, model

pytestmark = MARKS
__all__ = ["model"]
USUAL: dict[str, Any] = {"forward_s": [0.1, 0.1]}
# Clients, and at most the tokens of their prompts and answers.
LOAD = (4, 60, 120)
SHORT_ANSWERS = (6, 60, 16)


def stop_rank_1(server: Server) -> None:
    os.kill(int(server.processes()[1]["pid"]), signal.SIGSTOP)


def six_times_the_load(server: Server) -> None:
    server.serve(24, 60, 120)


def becomes(**faults: Any) -> Callable[[Server], None]:
    return lambda server: server.go_wrong(USUAL | faults)


@dataclass(frozen=True)
class Fault:
    """A fault of a server, and what is to be found: kind, rank, verdict, words of its sentences.

    rise: the least rise that the detector must see before; 0 if it learns nothing.
    """

    begin: Callable[[Server], None]
    kind: str
    verdict: str
    sentence: str
    explained: str = ""
    rank: int | None = None
    rise: float = 0.0
    ranks: int = 1
    load: tuple[int, int, int] = LOAD
    options: tuple[str, ...] = field(default=())


FAULTS = {
    "forward": Fault(
        becomes(forward_s=[0.115]), "step_regression", "slower_compute",
        "longer for the same work since iteration", explained="operator vllm_faults::kernels: 10",
        rise=0.14,
    ),
    "stopped rank": Fault(
        stop_rank_1, "hang", "stopped_rank", "the process of rank 1 does not respond",
        "rank 1 is stopped", 1, ranks=2,
    ),
    "slow rank": Fault(
        becomes(forward_s=[0.1, 0.13]), "straggler", "straggler",
        "rank 1 computes 2", "rank 1", 1, rise=0.25, ranks=2,
    ),
    "cache": Fault(
        six_times_the_load, "kv_thrash", "kv_thrash", "the KV cache is too small for the load",
        options=("--num-gpu-blocks-override=20",),
    ),
    "scheduler": Fault(
        becomes(schedule_s=0.05), "step_regression", "scheduler_bound",
        "longer for the same work since iteration", rise=0.2,
    ),
    "front end": Fault(
        becomes(front_end_s=0.4), "latency_regression", "blocked_front_end",
        "cause: the front end", "rank 2 is in write_access_logs (vllm_faults.py:", 2,
        rise=1.0, load=SHORT_ANSWERS,
    ),
}  # fmt: skip


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoopNode]:
    config: dict[str, Any] = {
        "exporters": {"jsonl": {"path": str(tmp_path / "telemetry.jsonl")}},
        "sources": {"nvml": {"enabled": False}},
        "triggers": {"captures_per_hour": 100, "cooldown_s": 0, "baseline": {"after_s": 30.0}},
    }
    with loop_node(tmp_path, **config) as node:
        node.start_daemon()
        yield node


def is_seen(node: LoopNode, fault: Fault) -> bool:
    """Return whether the detector knows the noise well enough."""
    (detector,) = [one for one in node.get("detectors") if one["kind"] == fault.kind]
    return any(
        one["answer"] == "fine" and (one["sees"] is None or one["sees"] <= fault.rise)
        for one in detector["readings"]
        if one["job"] == "tiny"
    )


def diagnosed(node: LoopNode, **request: str) -> list[Any]:
    return [capture for capture in node.captures(**request) if capture["diagnosis"]]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_captured_and_explained(node, model, name):
    fault = FAULTS[name]
    server = Server(node, model, fault.ranks, *fault.options, faults=USUAL)
    try:
        server.serve(*fault.load)
        poll(lambda: diagnosed(node, trigger="baseline"), f"a baseline: {node.get('captures')}")
        poll(lambda: is_seen(node, fault), f"{fault.kind} sees: {node.get('detectors')}")
        assert [one["sentence"] for one in node.anomalies(fault.kind)] == []
        begun = time.time()
        fault.begin(server)
        known = f"{fault.kind}: {node.get('anomalies')}"
        anomaly = poll(lambda: node.anomalies(fault.kind), known)[0]
        asked = {"anomaly_kind": fault.kind}
        diagnosis = poll(lambda: diagnosed(node, **asked), "its capture")[0]["diagnosis"]
        seen = {"fault": name, "seconds": round(anomaly["time"] - begun, 1)}
        said = {name: diagnosis[name] for name in ("verdict", "summary")}
        print(json.dumps(seen | {"sentence": anomaly["sentence"]} | said))
        assert (anomaly["rank"], diagnosis["verdict"]) == (fault.rank, fault.verdict)
        assert fault.sentence in anomaly["sentence"]
        assert fault.explained in diagnosis["summary"]
    finally:
        server.close()
