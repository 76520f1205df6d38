"""A job of ``training.py``: four observed ranks beside a daemon, and the switch of their faults."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from tests.loop.node import ROOT, LoopNode, poll

PROGRAM = ROOT / "tests" / "loop" / "training.py"
RANKS = 4
ALL = tuple(range(RANKS))
# Longer than any `grace_s`: deaths are judged together by then.
SETTLE_S = 8.0
# Four ranks and a daemon on few cores: whatever else runs makes all steps longer for a while, and
# that is reported, by right. It is not what is tested, so only what is larger counts.
ON_A_BUSY_MACHINE: dict[str, Any] = {
    "step_regression": {"min_effect": 0.25},
    "step_drift": {"min_effect": 0.25},
    "step_spikes": {"min_spike": 1.0},
    "comm_slow": {"min_rise": 2.0},
}


class Job:
    """The ranks of one run, started by ``warpwatch run``; the only ones of its node."""

    def __init__(self, node: LoopNode, name: str, **environment: str) -> None:
        self.node = node
        self.name = name
        self.folder = node.folder / name
        self.folder.mkdir()
        self.go_wrong({})
        command = ["-m", "warpwatch", "run", "--job", name, "--"]
        command += [sys.executable, str(PROGRAM), str(self.folder)]
        self.processes: list[subprocess.Popen[bytes]] = [
            node.start(
                f"{name}/rank{rank}", command, node.rank_environment(rank, RANKS) | environment
            )
            for rank in ALL
        ]

    def go_wrong(self, faults: dict[str, tuple[int, ...]]) -> None:
        """These faults in these ranks from now on, and no others."""
        lines = [" ".join((name, *map(str, ranks))) for name, ranks in faults.items()]
        part = self.folder / "fault.part"
        part.write_text("\n".join(lines))
        part.replace(self.folder / "fault")

    def has_trained(self, steps: int) -> None:
        def all_have() -> bool:
            ranks = [r for r in self.node.get("ranks") if r["job"] == self.name]
            return len(ranks) == RANKS and all(r["steps_total"] >= steps for r in ranks)

        poll(all_have, 300, f"{steps} steps: " + self.node.log(f"{self.name}/rank0"))

    def anomalies(self, kind: str | None = None) -> list[Any]:
        """Of this kind, or all that the daemon found, whatever they are about."""
        return [a for a in self.node.get("anomalies") if kind in (None, a["kind"])]

    def found(self, kind: str, timeout_s: float) -> Any:
        """The only anomaly of this kind, once it is there."""
        (anomaly,) = poll(lambda: self.anomalies(kind), timeout_s, f"{kind} is found")
        return anomaly

    def over(self, kind: str, timeout_s: float) -> None:
        poll(lambda: all(a["end_time"] for a in self.anomalies(kind)), timeout_s, f"{kind} is over")

    def has_ended(self) -> None:
        """All ranks have, whatever the reason, and who died of what has been judged."""

        def all_have() -> bool:
            ranks = [r for r in self.node.get("ranks") if r["job"] == self.name]
            return not any(r["status"] == "running" for r in ranks)

        poll(all_have, 60, f"the end of {self.name}: {self.node.get('ranks')}")
        time.sleep(SETTLE_S)

    def named(self) -> list[tuple[str, int | None]]:
        """Kinds and ranks of all that was found, the oldest first."""
        return [(a["kind"], a["rank"]) for a in sorted(self.anomalies(), key=lambda a: a["time"])]
