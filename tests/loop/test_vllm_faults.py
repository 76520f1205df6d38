"""Acceptance: faults of a real vLLM server are found, captured and explained while it serves.

Forward passes wait for 0.1 s, as the processor is shared (vllm_faults.py). Each fault has a server
of its own, which is well until its detector would see the fault.
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cases import cases
from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.vllm_server import MARKS, Server, model

pytestmark = MARKS
__all__ = ["model"]
USUAL: dict[str, Any] = {"forward_s": [0.1, 0.1]}


@dataclass(frozen=True)
class Fault:
    """A fault of a server and what is to be found, as vllm_faults.yaml describes them."""

    kind: str
    verdict: str
    sentence: str
    explained: str = ""
    rank: int | None = None
    rise: float = 0.0
    ranks: int = 1
    load: Sequence[int] = (4, 60, 120)
    options: Sequence[str] = ()
    becomes: dict[str, Any] | None = None
    stops: int | None = None
    then_load: Sequence[int] = ()

    def begin(self, server: Server) -> None:
        if self.becomes:
            server.go_wrong(USUAL | self.becomes)
        if self.stops is not None:
            os.kill(int(server.processes()[self.stops]["pid"]), signal.SIGSTOP)
        if self.then_load:
            server.serve(*self.then_load)


FAULTS = {name: Fault(**about) for name, about in cases(__file__).items()}


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
