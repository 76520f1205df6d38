"""Defines the faults of the demo, each with its expected findings, and their switch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from warpwatch_runtime import files

NONE = "none"
# The rank that is slow or that hangs.
CULPRIT = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. ``anomaly`` None: nothing may be found. ``rank`` None: any rank may be named.

    rise: its size, in the unit of the detector's status.
    """

    name: str
    story: str
    anomaly: str | None = None
    rank: int | None = None
    capture: str = "torch"
    verdicts: tuple[str, ...] = ()
    rise: float = 1.0


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "data_stall",
            "every sample now takes 5 ms or more to read, as from a slow disk",
            "data_stall",
            verdicts=("data_loading",),
            rise=0.3,
        ),
        Fault(
            "slow_rank",
            f"rank {CULPRIT} now does 40 ms of Python work in its forward pass for each rank",
            "straggler",
            CULPRIT,
            verdicts=("host_bound", "straggler"),
        ),
        Fault(
            "regression",
            "all ranks now check every gradient in Python after the backward pass",
            "step_regression",
            verdicts=("host_bound",),
        ),
        Fault(
            "hang",
            f"rank {CULPRIT} now waits for a lock that is never released",
            "hang",
            capture="stacks",
            verdicts=("late_rank",),
        ),
        Fault(NONE, "nothing is wrong; nothing may be found"),
    )
}


class Switch:
    """A file that says which fault is on; every rank looks at it once a step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self, fault: str) -> None:
        files.write(self._path, fault.encode(), durable=False)

    def get(self) -> str:
        try:
            return self._path.read_text()
        except OSError:
            return NONE


def python_work(seconds: float) -> int:
    """Use a core for ``seconds`` of its time, as per-sample Python code in a model does."""
    deadline = time.thread_time() + seconds
    rounds = 0
    while time.thread_time() < deadline:
        rounds += 1
    return rounds
