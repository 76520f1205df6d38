"""The faults of the demo, and the story of each, from the first step to the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from warpwatch_daemon.demo.processes import CULPRIT, JOB, NONE, DemoProcesses
from warpwatch_telemetry.errors import WarpwatchError


@dataclass(frozen=True, slots=True)
class DemoFault:
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
        DemoFault(
            "data_stall",
            "every sample now takes 5 ms or more to read, as from a slow disk",
            "data_stall",
            verdicts=("data_loading",),
            rise=0.3,
        ),
        DemoFault(
            "slow_rank",
            f"rank {CULPRIT} now does 40 ms of Python work in its forward pass for each rank",
            "straggler",
            CULPRIT,
            verdicts=("host_bound", "straggler"),
        ),
        DemoFault(
            "regression",
            "all ranks now check every gradient in Python after the backward pass",
            "step_regression",
            verdicts=("host_bound",),
        ),
        DemoFault(
            "hang",
            f"rank {CULPRIT} now waits for a lock that is never released",
            "hang",
            capture="stacks",
            verdicts=("late_rank",),
        ),
        DemoFault(NONE, "nothing is wrong; nothing may be found"),
    )
}


# Every rank trains this before the fault: warm-up, and a baseline of ten seconds.
BASELINE_STEPS = 100
BASELINE_S = 16.0
# Without a fault nothing may be found for this time.
QUIET_S = 30.0
# Other programs of the machine slow ranks down by less.
LEAST_RISE = 1.5
RISES = ("step_regression", "step_drift", "straggler")
START_TIMEOUT_S = 300.0
LEARN_TIMEOUT_S = 120.0
FOUND_TIMEOUT_S = 180.0
CAPTURE_TIMEOUT_S = 240.0
POLL_S = 0.25

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ending:
    """The findings of one fault; ``closed``: they are as expected."""

    fault: str
    anomaly: Any = None
    capture: Any = None
    diagnosis: Any = None
    closed: bool = False

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "closed"}


class Story:
    """Runs faults one after another, and reports through ``say``; ``clock``: as ``time``."""

    def __init__(self, processes: DemoProcesses, say: Say, clock: Any = time) -> None:
        self._processes = processes
        self._api = processes.api
        self._say = say
        self._clock = clock
        self._begun_at = 0.0

    def run(self, fault: DemoFault) -> Ending:
        ranks = self._processes.ranks
        self._say(f"training: {ranks} ranks, {BASELINE_S:.0f} s of healthy steps first")
        self.wait_for_steps()
        if fault.anomaly and not self._poll(lambda: self._is_ready(fault), LEARN_TIMEOUT_S):
            self._say(f"not ready after {LEARN_TIMEOUT_S:.0f} s: {self._seen(fault)}")
        self._begun_at = self._clock.time()
        self._say(f"fault {fault.name}: {fault.story}")
        self._processes.switch.set(fault.name)
        try:
            return self._quiet(fault) if fault.name == NONE else self._loop(fault)
        finally:
            self._processes.switch.set(NONE)

    def _quiet(self, fault: DemoFault) -> Ending:
        deadline = self._clock.monotonic() + QUIET_S
        told: set[str] = set()
        while self._clock.monotonic() < deadline:
            lacking = [a for a in self._anomalies() if _lacks_cores(a)]
            for anomaly in lacking:
                if anomaly["id"] not in told:
                    self._say(f"of other programs on this machine: {anomaly['summary']}")
                told.add(anomaly["id"])
            found = [a for a in self._anomalies() if a["id"] not in told]
            if found:
                self._say(f"found although nothing is wrong: {found[0]['summary']}")
                return Ending(fault.name, anomaly=found[0])
            self._pause()
        self._say(f"nothing was found in {QUIET_S:.0f} s, as it should be")
        return Ending(fault.name, closed=True)

    def _loop(self, fault: DemoFault) -> Ending:
        anomaly = self._poll(
            lambda: next((a for a in self._anomalies() if a["kind"] == fault.anomaly), None),
            FOUND_TIMEOUT_S,
        )
        if anomaly is None:
            self._say(f"not found within {FOUND_TIMEOUT_S:.0f} s: {self._seen(fault)}")
            return Ending(fault.name)
        after_s = anomaly["time"] - self._begun_at
        self._say(f"found after {after_s:.1f} s: {anomaly['kind']}: {anomaly['summary']}")
        capture = self._poll(lambda: self._captured(anomaly), CAPTURE_TIMEOUT_S)
        capture = capture or self._captured(anomaly, failed=True)
        if capture is None:
            self._say(
                f"no capture was completed: {self._processes.log_tail(self._processes.watcher)}"
            )
            return Ending(fault.name, anomaly)
        written = sum(1 for rank in capture["ranks"] if rank["state"] == "written")
        self._say(
            f"captured {capture['id']}: {capture['outcome']} {written}/{len(capture['ranks'])}"
        )
        short = {
            "id": capture["id"],
            "kind": capture["request"]["kind"],
            "outcome": capture["outcome"],
            "ranks": written,
        }
        diagnosis = self._verdict(capture)
        closed = (
            capture["outcome"] == "complete"
            and written == self._processes.ranks
            and short["kind"] == fault.capture
            and diagnosis is not None
            and diagnosis["verdict"] in fault.verdicts
            and fault.rank in (None, anomaly["rank"])
        )
        return Ending(fault.name, anomaly, short, diagnosis, closed)

    def _verdict(self, capture: Any) -> Any:
        full = capture["diagnosis"]
        if full is None:
            self._say(f"no diagnosis: {capture['diagnosis_outcome']}")
            return None
        self._say(f"verdict: {full['verdict']}: {full.get('summary', '')}")
        for finding in full.get("findings", [])[:1]:
            self._say(f"advice: {finding['advice']}")
        where = f"{self._processes.url}/api/v1/captures/{capture['id']}"
        name = "report.html" if "report.html" in capture["files"] else "diagnosis.json"
        self._say(f"report: {where}/{name}")
        return {key: full.get(key) for key in ("verdict", "findings", "summary")}

    # --- what the daemon says ---

    def wait_for_steps(self) -> None:
        def ready() -> Any:
            ranks = self._api.get("/api/v1/ranks")["ranks"]
            # Ranks of the last run may be shown as running for a moment.
            mine = filter(self._is_mine, ranks)
            return sum(map(_has_baseline, mine)) == self._processes.ranks or None

        if self._poll(ready, START_TIMEOUT_S) is None:
            raise WarpwatchError(f"the ranks did not train: {self._processes.log_tail('rank0')}")

    def _is_ready(self, fault: DemoFault) -> Any:
        """Return True if the fault's detector would find it in all ranks, and nothing is open."""
        readings = self._report(fault)["readings"]
        answers = [one["answer"] for one in readings]
        needed = self._processes.ranks if fault.anomaly == "straggler" else 1
        is_known = len(answers) >= needed and "learning" not in answers
        sees = all((one["sees"] or 0.0) <= fault.rise for one in readings)
        return (is_known and sees and not self._open()) or None

    def _seen(self, fault: DemoFault) -> str:
        """Return what the fault's detector says, and what else is open or held back."""
        report = self._report(fault)
        read = [one["text"] for one in report["readings"]]
        held = [f"held back by {one['cause']}: {one['summary']}" for one in report["suppressed"]]
        is_open = [f"{one['kind']} is open: {one['summary']}" for one in self._open()]
        return "; ".join(read + held + is_open) or f"{fault.anomaly} judges nothing of {JOB}"

    def _report(self, fault: DemoFault) -> Any:
        """Return how the fault's detector sees the job, with what it holds back."""
        report = self._api.get(f"/api/v1/detectors?kind={fault.anomaly}&job={JOB}")
        of = report["detectors"]
        readings = [one for each in of for one in each["readings"] if self._is_mine(one)]
        return {"readings": readings, "suppressed": report["suppressed"]}

    def _open(self) -> list[Any]:
        anomalies = self._api.get("/api/v1/anomalies")["anomalies"]
        return [one for one in anomalies if one["end_time"] is None and self._is_mine(one)]

    def _is_mine(self, one: Any) -> bool:
        """Return whether it is of this training, not of the last one."""
        return bool(one["run"] == self._processes.run)

    def _anomalies(self) -> list[Any]:
        anomalies = self._api.get("/api/v1/anomalies")["anomalies"]
        return [a for a in anomalies if a["time"] >= self._begun_at and not _of_the_machine(a)]

    def _captured(self, anomaly: Any, failed: bool = False) -> Any:
        """Return the anomaly's capture; after a failed one there may be another."""
        captures = self._api.get("/api/v1/captures")["captures"]
        without = (None,) if failed else (None, "failed")
        ended = [capture for capture in captures if capture["outcome"] not in without]
        return next((c for c in ended if c["request"]["anomaly_id"] == anomaly["id"]), None)

    def _poll(self, ask: Callable[[], Any], timeout_s: float) -> Any:
        deadline = self._clock.monotonic() + timeout_s
        while self._clock.monotonic() < deadline:
            answer = ask()
            if answer is not None:
                return answer
            self._pause()
        return None

    def _pause(self) -> None:
        self._processes.check_training()
        self._clock.sleep(POLL_S)


def _has_baseline(rank: Any) -> bool:
    trained_s = (rank["last_step_time"] or 0.0) - rank["first_time"]
    return (rank["step"] or 0) >= BASELINE_STEPS and trained_s >= BASELINE_S


def _lacks_cores(anomaly: Any) -> bool:
    """Return whether the anomaly reports that other programs have the ranks' cores."""
    return anomaly["kind"] in RISES and "of the time for a core" in anomaly["summary"]


def _of_the_machine(anomaly: Any) -> bool:
    """Return whether it is as small as the effect of other programs on this machine."""
    return anomaly["kind"] in RISES and anomaly["value"] < LEAST_RISE * anomaly["baseline"]
