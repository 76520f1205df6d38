"""A service over real files, and the two training processes that a test plays."""

import gzip
import importlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.daemon.ranks.ring_files import RingFile
from tests.daemon.ranks.sources import ranks_source
from tests.manual_clock import ManualClock
from warpwatch import protocol
from warpwatch_capturing.config import StoreConfig, TriggersConfig
from warpwatch_capturing.confinement import Ended, Run
from warpwatch_capturing.policy import Disk, Policy
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.service import CaptureService
from warpwatch_capturing.store import Store
from warpwatch_daemon.participants.local_ranks import LocalParticipants
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.state.hub import Hub
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.jobs import JobId

MANUAL = CaptureRequest(job="train", kind="torch", trigger="manual", steps=3)
# The job whose ranks a test plays.
TRAIN = JobId(f"uid/{os.getuid()}", "train", "r1")
_OF_ANOMALY: dict[str, Any] = {"anomaly_id": "a1", "anomaly_kind": "straggler"}
AUTOMATIC = CaptureRequest(kind="torch", trigger="anomaly", **_OF_ANOMALY, **TRAIN.fields())
ANOTHER = replace(AUTOMATIC, anomaly_id="a2")
# A rank chooses these tokens for the names of its files.
TOKEN = "0123456789abcdef"
MORE = "fedcba9876543210"


def anomaly(kind: str, **changes: Any) -> Anomaly:
    about = {"id": "a1", "time": 0.0, "severity": "warning", "summary": "rank 1 is slow"}
    return Anomaly(**{**about, **TRAIN.fields(), "kind": kind, **changes})


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


def read_here(module: str, arguments: Sequence[str], timeout_s: float, fds: Sequence[int]) -> Ended:
    """As ``confinement.run``, but in this process, which takes a tenth of the time."""
    said = io.StringIO()
    with redirect_stdout(said):
        status = importlib.import_module(module).main(arguments, confine=lambda memory, cpu: None)
    return Ended(status, tuple(said.getvalue().splitlines()))


class CaptureNode:
    """A service over real files, with two ranks or more played by the test.

    ``run`` reads traces.
    """

    def __init__(
        self,
        path: Path,
        stack: ExitStack,
        ranks: Sequence[int] = (0, 1),
        world_size: int | None = None,
        run: Run = read_here,
        said: Mapping[int, Mapping[str, Any]] | None = None,
        **triggers: Any,
    ) -> None:
        """``said``: more metadata of the ranks."""
        self.folder = RendezvousFolder(path / "run", path / "inbox", "0.0.0")
        stack.callback(self.folder.close)
        self.store = Store(StoreConfig(url=(path / "store").as_uri()))
        self.hub = Hub(10.0)
        self.source = ranks_source(self.folder)
        self.clock = ManualClock()
        self.run = run
        self.service = self._start(TriggersConfig(**triggers))
        self._stack = stack
        self._numbers = ranks
        self._world_size = world_size or len(ranks)
        self._said = said or {}
        self.rings = [self._started(rank) for rank in ranks]
        self.poll()
        self.now = self.clock.wall()
        self.connect()

    def connect(self) -> None:
        """Make what else of a daemon the test needs; also after a restart."""

    @property
    def at(self) -> float:
        return self.clock.monotonic()

    def _wall(self) -> float:
        """Return a later time at each call: captures are distinguished by it."""
        self.clock.advance(0.001)
        return self.clock.wall()

    def _ring(self, rank: int) -> RingFile:
        said = {"rank": rank, "world_size": self._world_size, "device": f"GPU-{rank}"}
        said |= self._said.get(rank, {})
        return RingFile(self.folder.ranks, wall=self.clock.wall, run=TRAIN.run, **said)

    def _started(self, rank: int) -> RingFile:
        """Start a process of the rank, which takes a step."""
        ring = self._ring(rank)
        ring.hold()
        self._stack.callback(ring.die)
        ring.step()
        return ring

    def kill(self, *ranks: int) -> None:
        for index in ranks:
            self.rings[index].die()

    def join(self, index: int) -> None:
        """A successor of the process at this place of ``rings``, which has ended."""
        self.poll()
        self.rings[index] = self._started(self.rings[index].rank)
        self.poll()

    def restart(self, config: TriggersConfig | None = None) -> None:
        """Another daemon on the same files, which the one before had the time to make."""
        self.service.finish_urgent()
        self.hub = Hub(10.0)
        self.service = self._start(config or self.service.policy.config)
        self.connect()

    def _start(self, config: TriggersConfig) -> CaptureService:
        self.hub.watch_ranks(lambda: self.source.states(self.at))
        monotonic = self.clock.monotonic
        # Measured once, and never too old.
        policy = Policy(config, Disk(self.store.path, lambda: 0.0), self.clock.wall)
        return CaptureService(
            policy,
            CaptureRegister(self.store, self.hub),
            LocalParticipants(policy, self.source, monotonic),
            self.hub,
            lambda busy: None,
            lambda: None,
            monotonic,
            self._wall,
            lambda *arguments: self.run(*arguments),
        )

    def poll(self, after_s: float = 0.0) -> None:
        self.clock.advance(after_s)
        for record in self.source.poll(self.clock.wall(), self.at):
            self.service.observe(record)
        self.service.advance(self.at)

    def command(self, rank: int) -> dict[str, Any]:
        path = self.folder.commands / (self.rings[rank].path.stem + ".cmd")
        return protocol.decode_command(path.read_bytes())[1]

    def answer(self, rank: int, event: str, **fields: Any) -> None:
        self.rings[rank].event(event, id=self.command(rank)["id"], **fields)

    def answer_all(self, event: str, **fields: Any) -> None:
        for rank in range(len(self.rings)):
            self.answer(rank, event, **fields)

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
        self.poll()
        self.service.finish()
        return self.capture(capture)

    def captured(self, request: CaptureRequest = MANUAL, *contents: Any) -> Capture:
        return self.complete(self.service.request(request), *contents)

    def complete(self, capture: Capture | None = None, *contents: Any) -> Capture:
        """Return the capture, else the newest, after its ranks have brought their traces."""
        asked = capture or self.captures[-1]
        for rank, content in zip_longest(asked.ranks, contents):
            self.deliver(self._numbers.index(rank.rank), content)
        return self.finished(asked)

    @property
    def captures(self) -> tuple[Capture, ...]:
        return self.hub.state().captures

    def capture(self, capture: Capture) -> Capture:
        return next(c for c in self.captures if c.id == capture.id)

    def counted(self, outcome: str, trigger: str = "manual", kind: str = "torch") -> float:
        wanted = {"kind": kind, "trigger": trigger, "outcome": outcome}.items()
        return sum(
            sample.value
            for family in self.hub.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "warpwatch_captures_total" and wanted <= sample.labels.items()
        )
