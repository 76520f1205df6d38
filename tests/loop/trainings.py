"""A job of ``training.py``, with the switch of its faults, and the jobs of ``healthy.py``."""

import subprocess
import time
from typing import Any

import psutil

from tests.loop.node import ROOT, LoopNode, poll

PROGRAM = ROOT / "tests" / "loop" / "training.py"
HEALTHY = PROGRAM.with_name("healthy.py")
RANKS = 4
ALL = tuple(range(RANKS))
# The kinds of ``healthy.py``, and the ranks of each.
HEALTHY_RANKS = {
    "accumulation": 2, "evaluation": 2, "checkpoints": 2, "sequences": 2, "noisy_neighbour": 2,
    "two_optimizers": 1, "gan": 1, "restarts": 1,
}  # fmt: skip
# Every other life of the run that is started again ends by a signal, so soon.
TERMINATED_AFTER_S = 30.0
# Longer than any `grace_s`: deaths are judged together by then.
SETTLE_S = 8.0
# Four ranks and a daemon share few cores. Other programs make all steps longer for a while, and the
# daemon rightly reports it. It is not tested here: it is not captured, and only rises of the whole
# job by a quarter count.
ON_A_BUSY_MACHINE = {"disabled": ["step_spikes", "comm_slow"]}
NOT_CAPTURED: dict[str, None] = dict.fromkeys(("step_regression", "step_drift"))
LEAST_RISE = 1.25


class HealthyJobs:
    def __init__(self, node: LoopNode, **environment: str) -> None:
        self._node = node
        self._environment = environment
        self._lives = 0
        self._terminate_at = float("inf")
        self.processes: dict[str, list[subprocess.Popen[bytes]]] = {}
        for kind, ranks in HEALTHY_RANKS.items():
            (node.folder / kind).mkdir()
            self._start(kind)
            node.have_trained(kind, ranks, 2)
        node.start("neighbour", [str(HEALTHY), "neighbour"], {})

    def _start(self, kind: str) -> None:
        environment = {"TORCHELASTIC_RUN_ID": kind} | self._environment
        program = [str(HEALTHY), kind, str(self._node.folder / kind)]
        ranks = HEALTHY_RANKS[kind]
        self.processes[kind] = [
            self._node.launch(kind, program, rank, ranks, environment) for rank in range(ranks)
        ]

    def restart(self) -> None:
        """Once a second: the run that ends, or is ended, begins again."""
        (process,) = self.processes["restarts"]
        now = time.monotonic()
        if process.poll() is not None:
            self._lives += 1
            self._terminate_at = now + TERMINATED_AFTER_S if self._lives % 2 else float("inf")
            self._start("restarts")
        elif now > self._terminate_at:
            process.terminate()

    def ended(self) -> list[str]:
        return [
            kind
            for kind, processes in self.processes.items()
            if kind != "restarts" and any(process.poll() is not None for process in processes)
        ]

    def processor_s(self) -> float:
        """Return the processor time of the running processes."""
        running = (p for processes in self.processes.values() for p in processes)
        times = [psutil.Process(p.pid).cpu_times() for p in running if p.poll() is None]
        return float(sum(one.user + one.system for one in times))


class Job:
    """The ranks of one run, started by ``warpwatch run``; the only ones of its node."""

    def __init__(self, node: LoopNode, name: str, **environment: str) -> None:
        self.node = node
        self.name = name
        self.folder = node.folder / name
        self.folder.mkdir()
        self.go_wrong({})
        program = [str(PROGRAM), str(self.folder)]
        self.processes = [
            node.launch(name, program, rank, RANKS, environment) for rank in range(RANKS)
        ]

    def go_wrong(self, faults: dict[str, tuple[int, ...]]) -> None:
        """These faults in these ranks from now on, and no others."""
        lines = [" ".join((name, *map(str, ranks))) for name, ranks in faults.items()]
        part = self.folder / "fault.part"
        part.write_text("\n".join(lines))
        part.replace(self.folder / "fault")

    def has_trained(self, steps: int) -> None:
        self.node.have_trained(self.name, RANKS, steps)

    def anomalies(self, kind: str | None = None) -> list[Any]:
        """Return the anomalies of this kind, or of all, that a busy machine does not explain."""
        return [
            a
            for a in self.node.get("anomalies")
            if kind in (None, a["kind"])
            if a["kind"] not in NOT_CAPTURED or a["value"] >= LEAST_RISE * a["baseline"]
        ]

    def found(self, kind: str) -> Any:
        (anomaly,) = poll(lambda: self.anomalies(kind), f"{kind} is found")
        return anomaly

    def over(self, kind: str) -> None:
        poll(lambda: all(a["end_time"] for a in self.anomalies(kind)), f"{kind} is over")

    def has_ended(self) -> None:
        def all_have() -> bool:
            ranks = self.node.get("ranks", job=self.name)
            return not any(r["status"] == "running" for r in ranks)

        poll(all_have, f"the end of {self.name}: {self.node.get('ranks')}")
        self.node.lets_pass(SETTLE_S)

    def named(self) -> list[tuple[str, int | None]]:
        return [(a["kind"], a["rank"]) for a in sorted(self.anomalies(), key=lambda a: a["time"])]
