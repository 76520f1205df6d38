"""A node whose pods mount only a folder of their own, as the kubelet makes it for each."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.daemon.ranks.sources import ranks_source
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.inboxes import Inboxes
from warpwatch_daemon.ranks.pods import KnownPods
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_daemon.ranks.table import LIMITS, Limits
from warpwatch_telemetry.records import Record
from warpwatch_telemetry.state import RankState

A = "0b9f7a52-6f0c-4c35-9e0a-1d2c3b4a5f60"
B = "7d1e8c44-1b2a-4f5e-8c9d-0a1b2c3d4e5f"
C = "f00dfeed-0000-4000-8000-000000000001"
STATIC = "8fae0c9d3d1f4a5b6c7d8e9f0a1b2c3d"

_FIND = """
import os, sys
from warpwatch.daemon_folder import find_daemon
print(find_daemon({"WARPWATCH_DIR": sys.argv[1]}, os.getuid()) is not None)
"""


def finds_daemon(folder: Path) -> bool:
    """Whether a shim would."""
    done = subprocess.run([sys.executable, "-c", _FIND, str(folder)], capture_output=True)
    return done.stdout == b"True\n"


class PodNode:
    """``rejects`` counts what the daemon refused."""

    def __init__(
        self, path: Path, limits: Limits = LIMITS, known_pods: KnownPods | None = None
    ) -> None:
        self.limits = limits
        self.known_pods = known_pods
        self.folder = RendezvousFolder(path / "run", path / "inbox", "0.0.0")
        self.rejects: Counter[str] = Counter()
        self.source = self.start()
        self.inboxes = Inboxes(
            self.folder, lambda: self.source.served_pods(), lambda r: self.rejects.update([r])
        )

    def start(self) -> RanksSource:
        """The ranks source of a daemon that has just started."""
        return ranks_source(
            self.folder, lambda reason: self.rejects.update([reason]), self.limits, self.known_pods
        )

    def pod(self, uid: str) -> Path:
        return self.folder.path / "pods" / uid

    def inbox(self, uid: str) -> Path:
        return self.folder.inbox / "pods" / uid

    def mount(self, *uids: str) -> None:
        """What the kubelet does before the pods' containers start, and the daemon after it."""
        for uid in uids:
            self.pod(uid).mkdir(parents=True, exist_ok=True)
            self.inbox(uid).mkdir(parents=True, exist_ok=True)
        self.poll()

    def poll(self, later_s: float = 0.0) -> list[Record]:
        records = self.source.poll(time.time() + later_s, time.monotonic() + later_s)
        self.inboxes.tend(time.monotonic() + later_s)
        return records

    def states(self) -> list[RankState]:
        found = self.source.states(time.monotonic())
        return sorted(found, key=lambda state: (state.job, state.rank))

    def served(self) -> set[str]:
        """The pods in whose folders a lock was made and ranks may write."""
        pods = (self.folder.path / "pods").iterdir()
        return {pod.name for pod in pods if (pod / "daemon.lock").exists()}

    def close(self) -> None:
        self.source.close()
        self.folder.close()
