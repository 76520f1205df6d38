"""From the request to the recording, and to the diagnosis: two real ranks under torch.profiler."""

from __future__ import annotations

import statistics
import time
from typing import Any

from warpwatch_daemon.cli.capture import wait
from warpwatch_daemon.demo.processes import JOB, DemoProcesses
from warpwatch_daemon.demo.story import Story

CAPTURES = 5
STEPS = 5


def measure() -> dict[str, Any]:
    with DemoProcesses("127.0.0.1:0", None) as processes:
        processes.start_daemon()
        processes.start_training()
        Story(processes, lambda text: None).wait_for_steps()
        runs = [one(processes) for _ in range(CAPTURES)]
    return {
        "captures": CAPTURES,
        "ranks": 2,
        "steps": STEPS,
        **{name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]},
        "limits": {"request_to_recording_s": "0.2 s and 4 steps"},
    }


def one(processes: DemoProcesses) -> dict[str, float]:
    asked = time.time()
    body = {"job": JOB, "kind": "torch", "steps": STEPS}
    capture = processes.api.post("/api/v1/captures", body)
    done = wait(processes.api, capture["id"], 120)
    if done["outcome"] != "complete":
        raise RuntimeError(f"capture {done['id']}: {done['outcome']}: {done['detail']}")
    answered = time.time()
    ranks = processes.api.get("/api/v1/ranks")["ranks"]
    step_s = statistics.median(s for rank in ranks for s in rank["recent_s"])
    to_recording_s = done["recording_time"] - asked
    return {
        "step_s": step_s,
        "request_to_recording_s": to_recording_s,
        "recording_steps_beyond_0.2_s": max(0.0, (to_recording_s - 0.2) / step_s),
        "request_to_files_s": done["end_time"] - asked,
        "request_to_diagnosis_s": answered - asked,
    }


if __name__ == "__main__":
    print(measure())
