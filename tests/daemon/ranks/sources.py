"""A node's ranks without the daemon's loops: the source alone, or with pods and a manual clock."""

import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.daemon.ranks.ring_files import RingFile
from tests.manual_clock import ManualClock
from warpwatch_daemon.ranks.counts import Positions
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.inbox import GonePods, Inboxes
from warpwatch_daemon.ranks.pods import KnownPods
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_daemon.ranks.table import LIMITS, Limits
from warpwatch_telemetry.records import RankEvent, Record, Step
from warpwatch_telemetry.state import RankState

A = "0b9f7a52-6f0c-4c35-9e0a-1d2c3b4a5f60"
B = "7d1e8c44-1b2a-4f5e-8c9d-0a1b2c3d4e5f"
C = "f00dfeed-0000-4000-8000-000000000001"
STATIC = "8fae0c9d3d1f4a5b6c7d8e9f0a1b2c3d"

# The time between the creations of two rings, a fraction that a float holds exactly.
TICK_S = 2.0**-10

# A training process that takes a step.
TRAINS = """
import warpwatch
monitor = warpwatch.attach(job="seen")
while monitor.clock.ring is None:
    with monitor.step():
        pass
"""
_FIND = """
import os, sys
from warpwatch.rendezvous import find_daemon
for line in sys.stdin:
    print(find_daemon({"WARPWATCH_DIR": line[:-1]}, os.getuid()) is not None, flush=True)
"""


def ranks_source(
    folder: RendezvousFolder,
    reject: Callable[[str], None] = lambda reason: None,
    limits: Limits = LIMITS,
    known_pods: KnownPods | None = None,
    **clock: Callable[[], float],
) -> RanksSource:
    """Return a source that scans at each poll and writes positions beside the folder at once."""
    positions = Positions(folder.path.parent, wake=lambda: positions.write())
    return RanksSource(folder, positions, 10.0, reject, 0, limits, known_pods, **clock)


def finds_daemon(folder: Path) -> bool:
    """Whether a shim finds a daemon there, asked of a process of its own.

    A daemon's own process would lose the lock with any descriptor of the file.
    """
    finder = _finder()
    assert finder.stdin is not None and finder.stdout is not None
    finder.stdin.write(f"{folder}\n")
    finder.stdin.flush()
    return finder.stdout.readline() == "True\n"


@functools.cache
def _finder() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _FIND]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class RankNode:
    """A rendezvous, its ranks source, and the pods whose folders a kubelet makes.

    The clock stands still but for ``poll`` and ``clock.advance``; it starts at the file system's
    time in whole seconds. ``rejects`` counts what the daemon refused.
    """

    def __init__(
        self, path: Path, limits: Limits = LIMITS, known_pods: KnownPods | None = None
    ) -> None:
        self.limits = limits
        self.known_pods = known_pods
        self.folder = RendezvousFolder(path / "run", path / "inbox", "0.0.0")
        self.began = float(int(self.folder.ranks.stat().st_ctime))
        self.clock = ManualClock(wall=self.began)
        self.rejects: Counter[str] = Counter()
        self._rings: list[RingFile] = []
        self._made = -1
        self.source = self.start()
        self.inboxes = Inboxes(
            self.folder, lambda: self.source.served_pods(), self.reject, self.clock.monotonic
        )
        self.gone = GonePods(
            self.folder, lambda: None, lambda: self.source.idle_pods(), self.clock.monotonic
        )

    def reject(self, reason: str) -> None:
        self.rejects[reason] += 1

    def start(self) -> RanksSource:
        return ranks_source(
            self.folder, self.reject, self.limits, self.known_pods, monotonic=self.clock.monotonic
        )

    def restart(self) -> list[Record]:
        self.source.close()
        self.source = self.start()
        return self.poll()

    def file(self, pod: str | None = None, **said: Any) -> RingFile:
        """A ring that no process holds, and that is made later than all before it.

        The kubelet has mounted the folder of its pod.
        """
        ranks = self.folder.ranks if pod is None else self.pod(pod) / "ranks"
        if pod is not None and not self.pod(pod).exists():
            self.mount(pod)
        self._made += 1
        made = self._made * TICK_S
        return RingFile(ranks, wall=lambda: self.clock.wall() + made, **said)

    def ring(self, pod: str | None = None, **said: Any) -> RingFile:
        """Make a ring that a process holds until it is killed (``ring.die``) or the test ends."""
        return self.hold(self.file(pod, **said))

    def met(self, pod: str | None = None, *, steps: int = 0, **said: Any) -> RingFile:
        """Make a held ring with this number of steps that the source has read."""
        ring = self.ring(pod, **said)
        ring.steps_of(steps)
        self.poll()
        return ring

    def hold(self, ring: RingFile) -> RingFile:
        ring.hold()
        self._rings.append(ring)
        return ring

    def pod(self, uid: str) -> Path:
        return self.folder.path / "pods" / uid

    def inbox(self, uid: str) -> Path:
        return self.folder.inbox / "pods" / uid

    def mount(self, *uids: str) -> None:
        """Mount the folders as the kubelet does before containers start, then poll."""
        for uid in uids:
            self.pod(uid).mkdir(parents=True, exist_ok=True)
            self.inbox(uid).mkdir(parents=True, exist_ok=True)
        self.poll()

    def poll(self, *at_s: float) -> list[Record]:
        """Poll now, or at each of these seconds since the node's start, and return the records."""
        records: list[Record] = []
        for at in at_s or (0.0,):
            self.clock.advance(max(0.0, self.began + at - self.clock.wall()))
            records += self.source.poll(self.clock.wall(), self.clock.monotonic())
            self.inboxes.tend(self.clock.monotonic())
            self.gone.sweep(self.clock.monotonic())
        return records

    def steps(self, at_s: float = 0.0) -> list[int]:
        return [one.step for one in self.poll(at_s) if isinstance(one, Step)]

    def events(self, at_s: float = 0.0, *, without: str = "process") -> list[RankEvent]:
        records = self.poll(at_s)
        return [one for one in records if isinstance(one, RankEvent) and one.event != without]

    def states(self) -> list[RankState]:
        found = self.source.states(self.clock.monotonic())
        return sorted(found, key=lambda state: (state.job, state.rank))

    def newest(self, *at_s: float) -> RankState:
        self.poll(*at_s)
        (state,) = self.states()
        return state

    def served(self) -> set[str]:
        pods = (self.folder.path / "pods").iterdir()
        return {pod.name for pod in pods if (pod / "daemon.lock").exists()}

    def close(self) -> None:
        for ring in self._rings:
            ring.die()
        self.source.close()
        self.folder.close()


def made_later(path: Path, than: Path) -> None:
    """Change ``path`` until the file system's clock dates it later."""
    while path.stat().st_ctime_ns <= than.stat().st_ctime_ns:
        os.utime(path)
