"""Healthy trainings among jobs that come and go: nothing is found in them, and nothing grows."""

import itertools
import json
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.preloaded import ShiftedClock
from tests.loop.programs import SHORT_JOBS
from tests.loop.trainings import HEALTHY_RANKS, HealthyJobs

pytestmark = pytest.mark.soak

# `make soak` takes 30.
MINUTES = float(os.environ.get("SOAK_MINUTES", "3"))
# Until then everything may grow: five minutes of thirty.
WARM_SHARE = 1 / 6
# The daemon is restarted so often in the first half, and then goes on.
RESTARTS = 3
CAPTURE_EACH_S, CLOCK_EACH_S, SAMPLE_EACH_S = 15, 40, 5
OFFSETS_S = (0, 90, -90, 3600, -3600)
# These have learned what is usual by the end, and could have seen that something is not: of one
# rank, and of several.
JUDGED = ("hang", "data_stall", "step_regression")
JUDGED_RANKS = (*JUDGED, "straggler", "comm_slow")
# Jobs that do not live long enough, or have too few steps, for more kinds.
JUDGED_OF = {"restarts": ("hang",), "two_optimizers": ("hang",)}
# Jobs that ended are shown and their rings kept for ten minutes; a ring costs a descriptor.
KEPT_JOBS = 660
# Short jobs that lived while the daemon was restarted.
MAX_UNSEEN = 60
# The allowed growth from the first third to the last.
MAX_MORE = {"descriptors": 8, "threads": 3, "resident_mib": 16.0, "inbox": 8, "store": 40}


class Soak:
    """The events on a node each second, and the resources that its daemon uses meanwhile."""

    def __init__(
        self, node: LoopNode, jobs: HealthyJobs, clock: ShiftedClock, seconds: float
    ) -> None:
        self._node = node
        self._jobs = jobs
        self._clock = clock
        self._seconds = seconds
        self._chance = random.Random(0)
        self.samples: list[dict[str, float]] = []
        # Anomalies of healthy jobs by id: the first time seen, and the load of the machine.
        self.found: dict[str, dict[str, Any]] = {}
        self.counts = {"scrapes": 0, "captures": 0, "restarts": 0, "clock_set": 0}

    def run(self) -> None:
        begun = time.monotonic()
        for second in itertools.count(1):
            elapsed_s = time.monotonic() - begun
            if elapsed_s > self._seconds:
                return
            self._each_second(second)
            if elapsed_s > (self.counts["restarts"] + 1) * self._seconds / 2 / RESTARTS:
                self._restart()
            if second % SAMPLE_EACH_S == 0:
                self.samples.append({"elapsed_s": round(elapsed_s), **self.measured()})
                self._note_anomalies(round(elapsed_s))
                unseen = self._node.log("rank9").splitlines()
                assert len(unseen) < MAX_UNSEEN, unseen[:3]
            time.sleep(max(0.0, begun + second - time.monotonic()))

    def _note_anomalies(self, elapsed_s: int) -> None:
        for one in self._node.get("anomalies"):
            if one["job"] in HEALTHY_RANKS:
                seen = self.found.setdefault(one["id"], {"elapsed_s": elapsed_s, "load": load()})
                seen |= {name: one[name] for name in ("kind", "severity", "job", "summary")}

    def _each_second(self, second: int) -> None:
        self._jobs.restart()
        assert self._node.http.get("/metrics").status_code == 200
        self.counts["scrapes"] += 1
        if second % CAPTURE_EACH_S == 0:
            short = [r["job"] for r in self._node.get("ranks") if r["status"] == "running"][-1]
            healthy = self._chance.choice(list(HEALTHY_RANKS))
            job, kind = (short, "stacks") if second % 2 else (healthy, "torch")
            asked = {"job": job, "kind": kind, "steps": 2}
            answer = self._node.http.post("/api/v1/captures", json=asked)
            self.counts["captures"] += answer.status_code == 202
        if second % CLOCK_EACH_S == 0:
            self._clock.set(self._chance.choice(OFFSETS_S))
            self.counts["clock_set"] += 1

    def _restart(self) -> None:
        if self.counts["restarts"] >= RESTARTS:
            return
        self.counts["restarts"] += 1
        if self.counts["restarts"] % 2:
            self._node.terminate_daemon()
        else:
            self._node.kill_daemon()
        self._node.start_daemon(**self._clock.environment)

    def measured(self) -> dict[str, float]:
        daemon = psutil.Process(self._node.daemon.pid)
        rings = len(list(self._node.run_dir.glob("ranks/*")))
        return {
            # One a ring, whose number is bounded by itself.
            "descriptors": daemon.num_fds() - rings,
            "threads": daemon.num_threads(),
            "resident_mib": round(daemon.memory_info().rss / 2**20, 1),
            "load": load(),
            "rings": rings,
            "commands": len(list(self._node.run_dir.glob("commands/*"))),
            "inbox": len(list((self._node.folder / "inbox").rglob("*"))),
            # By year; summaries of runs lie beside them, as many as there were jobs up to 1,000.
            "store": len(list((self._node.folder / "captures").glob("2*/**/*"))),
        }

    def peaks(self) -> tuple[dict[str, float], dict[str, float]]:
        warm = [one for one in self.samples if one["elapsed_s"] > WARM_SHARE * self._seconds]
        halves = warm[: len(warm) // 2], warm[len(warm) // 2 :]
        before, after = ({key: max(one[key] for one in half) for key in half[0]} for half in halves)
        return before, after


def load() -> float:
    """Return the load of the machine. Above twice its cores, other programs made the jobs slow."""
    return round(os.getloadavg()[0], 1)


def state_of(process: subprocess.Popen[bytes]) -> str:
    about = psutil.Process(process.pid)
    where = Path(f"/proc/{process.pid}/wchan").read_text()
    return f"{about.status()} in {where}, {len(about.children())} children"


def unable(node: LoopNode) -> dict[tuple[str, str], set[str]]:
    """By job and kind, the answers of detectors that cannot say that all is fine."""
    said = node.http.get("/api/v1/detectors").json()["detectors"]
    readings = {detector["kind"]: detector["readings"] for detector in said}
    answers = {
        (job, kind): {reading["answer"] for reading in readings[kind] if reading["job"] == job}
        for job, ranks in HEALTHY_RANKS.items()
        for kind in JUDGED_OF.get(job, JUDGED_RANKS if ranks > 1 else JUDGED)
    }
    return {what: given for what, given in answers.items() if given != {"fine"}}


def wait_until_able(node: LoopNode, jobs: HealthyJobs) -> None:
    """A job that is just begun again, or whose clock has leapt, is judged a moment later."""

    def is_able() -> bool:
        jobs.restart()
        return not unable(node)

    try:
        poll(is_able, "all detectors judge all jobs")
    except AssertionError as error:
        raise AssertionError(f"{error}; unable: {unable(node)}") from None


@pytest.mark.torch
def test_nothing_is_found_in_healthy_trainings_and_nothing_of_the_daemon_grows(
    open_path, tmp_path, capsys
):
    config: dict[str, Any] = {
        "exporters": {"jsonl": {"path": str(tmp_path / "telemetry.jsonl")}},
        "sources": {"nvml": {"enabled": False}},
        "store": {"url": (open_path / "captures").as_uri(), "max_captures": 4},
    }
    clock = ShiftedClock(open_path)
    with loop_node(open_path, **config) as node:
        node.start_daemon(**clock.environment)
        jobs = HealthyJobs(node, **clock.environment)
        short_jobs = node.start_rank(9, SHORT_JOBS, "100", **clock.environment)
        soak = Soak(node, jobs, clock, 60 * MINUTES)
        begun_s = jobs.processor_s()
        soak.run()
        busy = (jobs.processor_s() - begun_s) / (60 * MINUTES * (os.cpu_count() or 1))
        before, after = soak.peaks()
        with capsys.disabled():
            told = {"minutes": MINUTES, **soak.counts, "jobs_of_machine": round(busy, 2)}
            print(json.dumps({**told, "peaks": [before, after]}))
            for found in soak.found.values():
                print(json.dumps(found))
        assert jobs.ended() == []
        assert short_jobs.poll() is None
        assert after["rings"] > 60, f"no jobs came any more; their parent: {state_of(short_jobs)}"
        assert [one for one in soak.found.values() if one["severity"] != "info"] == []
        wait_until_able(node, jobs)
        assert "ERROR" not in node.log("daemon")
        assert {key: after[key] - before[key] > MAX_MORE[key] for key in MAX_MORE} == dict.fromkeys(
            MAX_MORE, False
        )
        assert max(after["rings"], after["commands"]) < KEPT_JOBS
