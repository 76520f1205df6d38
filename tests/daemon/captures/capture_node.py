"""A coordinator over real files, and the two training processes that a test plays."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.daemon.ranks.ring_files import RingFile
from tests.daemon.ranks.sources import ranks_source
from warpwatch import protocol
from warpwatch_daemon.captures.coordinator import Coordinator
from warpwatch_daemon.captures.disk import Disk
from warpwatch_daemon.captures.policy import Policy
from warpwatch_daemon.captures.session import CaptureBackend
from warpwatch_daemon.captures.shim_backend import ShimBackend
from warpwatch_daemon.captures.store import Store
from warpwatch_daemon.config.sections import StoreConfig
from warpwatch_daemon.config.triggers import TriggersConfig
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.state.hub import Hub
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.jobs import JobId

MANUAL = CaptureRequest(job="train", kind="torch", trigger="manual", steps=3)
# Of the ranks that a test plays.
TRAIN = JobId(f"uid/{os.getuid()}", "train", "r1")
AUTOMATIC = CaptureRequest(
    kind="torch",
    trigger="anomaly",
    anomaly_id="a1",
    anomaly_kind="straggler",
    **TRAIN.fields(),
)

# What a rank chooses for the names of its file, and of what lies beside it.
TOKEN = "0123456789abcdef"
MORE = "fedcba9876543210"

ANOTHER = replace(AUTOMATIC, anomaly_id="a2")


def trace(rank: int = 0, steps: range = range(3, 6), **changes: Any) -> dict[str, Any]:
    """The least that is verified and diagnosed: annotated steps with an operator in each."""
    events = []
    for step in steps:
        events += [
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1,
             "tid": 1, "ts": 1000.0 * step, "dur": 900.0},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1,
             "ts": 1000.0 * step + 10, "dur": 800.0},
        ]  # fmt: skip
    about = {"rank": rank, "job": "train", "world_size": 2}
    return {"schemaVersion": 1, "warpwatch": about, "traceEvents": events, **changes}


class CaptureNode:
    """A coordinator over real files, with two ranks or more played by the test."""

    def __init__(
        self,
        path: Path,
        stack: ExitStack,
        backend: CaptureBackend | None = None,
        ranks: Sequence[int] = (0, 1),
        world_size: int | None = None,
        **triggers: Any,
    ) -> None:
        self.folder = RendezvousFolder(path / "run", path / "inbox", "0.0.0")
        stack.callback(self.folder.close)
        self.store = Store(StoreConfig(url=(path / "store").as_uri()))
        self.hub = Hub(10.0)
        self.source = ranks_source(self.folder)
        self.at = time.monotonic()
        self.coordinator = self._start(TriggersConfig(**triggers), backend)
        self._stack = stack
        self._numbers = ranks
        self._world_size = world_size or len(ranks)
        self.rings = [self._ring(rank) for rank in ranks]
        self.holders = [stack.enter_context(ring.held()) for ring in self.rings]
        for ring in self.rings:
            ring.step()
        self.poll()

    def _ring(self, rank: int) -> RingFile:
        said = {"rank": rank, "world_size": self._world_size, "device": f"GPU-{rank}"}
        return RingFile(self.folder.ranks, run=TRAIN.run, **said)

    def join(self, index: int) -> None:
        """A successor of the process at this place of ``rings``, which has ended."""
        self.poll()
        self.rings[index] = self._ring(self.rings[index].rank)
        self.holders[index] = self._stack.enter_context(self.rings[index].held())
        self.rings[index].step()
        self.poll()

    def restart(self, config: TriggersConfig | None = None) -> None:
        """Another daemon on the same files, which the one before had the time to make."""
        self.coordinator.finish_urgent()
        self.hub = Hub(10.0)
        self.coordinator = self._start(config or self.coordinator.policy.config)

    def _start(self, config: TriggersConfig, backend: CaptureBackend | None = None) -> Coordinator:
        self.hub.watch_ranks(lambda: self.source.states(self.at))
        policy = Policy(config, Disk(self.store.path))
        return Coordinator(
            policy,
            self.store,
            backend or ShimBackend(policy, self.source),
            self.hub,
            lambda busy: None,
            lambda: None,
            lambda: self.at,
        )

    def poll(self, after_s: float = 0.0) -> None:
        self.at += after_s
        for record in self.source.poll(time.time(), self.at):
            self.coordinator.observe(record)
        self.coordinator.advance(self.at)

    def command(self, rank: int) -> dict[str, Any]:
        path = self.folder.commands / (self.rings[rank].path.stem + ".cmd")
        return protocol.decode_command(path.read_bytes())[1]

    def answer(self, rank: int, event: str, **fields: Any) -> None:
        self.rings[rank].event(event, id=self.command(rank)["id"], **fields)

    def deliver(self, rank: int, content: Any = None, suffix: str = ".pt.trace.json.gz") -> None:
        """Write the rank's file into the inbox and say so; None: the trace that was asked for."""
        command = self.command(rank)
        first = command["start_step"]
        steps = range(first, first + command["steps"])
        found = trace(self._numbers[rank], steps) if content is None else content
        data = found if isinstance(found, bytes) else gzip.compress(json.dumps(found).encode())
        name = f"{command['id']}.{self.rings[rank].path.stem}.{TOKEN}{suffix}"
        (self.folder.inbox / name).write_bytes(data)
        said = {"first_step": steps[0], "last_step": steps[-1], "token": TOKEN, "more": MORE}
        self.answer(rank, "capture_finished", **said)

    def finished(self, capture: Capture) -> Capture:
        """The capture after the files that were delivered are taken over."""
        self.poll()
        self.coordinator.finish()
        return self.capture(capture)

    def capture(self, capture: Capture) -> Capture:
        return next(c for c in self.hub.state().captures if c.id == capture.id)

    def counted(self, outcome: str, trigger: str = "manual", kind: str = "torch") -> float:
        """Whosoever they are."""
        wanted = {"kind": kind, "trigger": trigger, "outcome": outcome}.items()
        return sum(
            sample.value
            for family in self.hub.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "warpwatch_captures_total" and wanted <= sample.labels.items()
        )
