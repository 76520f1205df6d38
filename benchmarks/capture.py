"""From the request to the recording, and to the diagnosis: two real ranks under torch.profiler."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.limits import at_most
from benchmarks.processes import CannotMeasure
from warpwatch_daemon.cli.capture import wait
from warpwatch_daemon.demo.processes import JOB, RANKS, DemoProcesses
from warpwatch_daemon.demo.story import Story

CAPTURES = 5
STEPS = 5
TIMEOUT_S = 120
# From the request to the recording: the shim's look at its command file, and the agreed margin.
MAX_LOOK_S, MAX_STEPS = 0.2, 4.0


def measure() -> dict[str, Any]:
    with DemoProcesses("127.0.0.1:0", None) as processes:
        processes.start_daemon()
        processes.start_training()
        Story(processes, lambda text: None).wait_for_steps()
        runs = [one(processes) for _ in range(CAPTURES)]
    figures = {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}
    beyond = max(0.0, (figures["request_to_recording_s"] - MAX_LOOK_S) / figures["step_s"])
    return {
        "captures": CAPTURES,
        "ranks": RANKS,
        "steps": STEPS,
        **figures,
        "limits": [at_most("steps to the recording beyond 0.2 s", round(beyond, 2), MAX_STEPS)],
    }


def one(processes: DemoProcesses) -> dict[str, float]:
    asked = time.time()
    body = {"job": JOB, "kind": "torch", "steps": STEPS}
    capture = wait(processes.api, processes.api.post("/api/v1/captures", body)["id"], TIMEOUT_S)
    if capture["outcome"] != "complete":
        raise CannotMeasure(f"capture {capture['id']}: {capture['outcome']}: {capture['detail']}")
    ranks = processes.api.get("/api/v1/ranks")["ranks"]
    return {
        "step_s": statistics.median(s for rank in ranks for s in rank["recent_s"]),
        "request_to_recording_s": capture["recording_time"] - asked,
        "request_to_files_s": capture["end_time"] - asked,
        "request_to_diagnosis_s": time.time() - asked,
    }
