"""A node that has each part that is shown, in each form that the part may have."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tests.daemon.http.conftest import ENDED, NOW, STRAGGLER, MemoryAgent
from warpwatch_detection.anomalies.tracked import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.captures import Capture, Decision
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import Attribution, DeviceProcess, Workload
from warpwatch_telemetry.state import Histogram, JobState, RankState, Sensitivity, State

# Steps that were too many and slowed the job down for good; a trace that lacks something, where
# chance explains what steps take since; no memory for the diagnosis; and a capture that has begun.
_PARTS = msgspec.json.decode(Path(__file__).with_name("everything.json").read_bytes())
_CAPTURES = msgspec.convert(_PARTS["captures"], tuple[Capture, ...])
_SENSITIVITIES = msgspec.convert(_PARTS["sensitivities"], tuple[Sensitivity, ...])
_DECISIONS = msgspec.convert(_PARTS["decisions"], tuple[Decision, ...])
# Replicas of an inference server: one with requests, one of its own kind, and an idle one.
_SERVERS = msgspec.convert(_PARTS["servers"], tuple[JobState, ...])
_PROCESSES = msgspec.convert(_PARTS["processes"], tuple[RankState, ...])


def everything(now: State) -> State:
    gpus = now.devices[:3]
    first, second = (replace(rank, recent_s=rank.recent_s[-4:]) for rank in now.ranks)
    xids: dict[SeriesKey, float] = {
        ("device_xid_errors_total", ("79",)): 1.0,
        ("device_xid_last_timestamp_seconds", ("79",)): NOW - 60,
        ("device_xid_errors_total", ("48",)): 0.0,
    }
    instance = replace(gpus[1].device, gpu_instance="7", profile="1g.10gb")
    unknown: dict[str, Any] = {"recent_s": (), "steps_per_s": None, "durations": Histogram()}
    unknown |= {"samples_per_s": None, "tokens_per_s": None, "phases_s": {}}
    ranks = (
        replace(
            first,
            steps_elsewhere=2000,
            parallel={"pipeline": (3, 4), "data": (0, 2), "tensor": (0, 1)},
        ),
        replace(second, status="stopped", silent_reason="holds the GIL"),
        replace(second, rank=2, name="2", status="stopped", silent_reason="stopped"),
        replace(second, rank=3, name="3", calls_without_step=130, step_clock="", **unknown),
        replace(second, rank=4, name="4", status="died", job="other", owner="uid/1001", **unknown),
    )
    # The name is not Unicode.
    process = DeviceProcess(7, "caf\udce9", 2**30, 0.5)
    job = replace(now.jobs[0], model_flops_ratio={"shapes": 0.41}, memory_ratio=0.76)
    cold = replace(STRAGGLER, id="a8", severity="info", time=NOW - 1, reopened=2)
    crash = replace(STRAGGLER, id="a9", severity="critical", time=NOW - 300, summary="rank 0 died")
    return replace(
        now,
        devices=(
            replace(gpus[0], up=False, reason="lost", values=xids),
            replace(gpus[1], device=instance, processes=(process,)),
            replace(gpus[2], values={("device_encoder_utilization_ratio", ()): float("nan")}),
        ),
        ranks=(*ranks, *_PROCESSES),
        jobs=(replace(job, tokens_per_joule=0.0123), *_SERVERS),
        anomalies=(
            *(STRAGGLER, cold, crash, replace(ENDED, explained_by="a7")),
            *(
                replace(ENDED, id="a4", explained_by="a0"),
                replace(ENDED, id="a5", end_time=NOW - 9),
            ),
        ),
        captures=(*_CAPTURES, now.captures[0]),
        attributions=(
            Attribution("kubelet", NOW, {gpus[2].device.uuid: (Workload("ml", "llama-0", "c"),)}),
        ),
        sensitivities=_SENSITIVITIES,
        decisions=_DECISIONS,
    )


def fill(agent: MemoryAgent) -> None:
    agent.now = everything(agent.now)
    agent.lacks = ("nvml: library not found",)
    blind = DetectorStatus("fine", "limit 1.9", job="llama-7b", rank=1, sees=0.9, effect=0.2)
    fine = DetectorStatus("fine", "12 % of 30 %", job="llama-7b", rank=1, value=0.12, limit=0.3)
    found = Detected(NOW, "warning", "25 % slower", job="llama-7b")
    suppressed = Suppressed("step_regression", found, "straggler", "a7", since=NOW)
    agent.seen = ({"data_stall": [fine], "straggler": [blind], "hang": []}, (suppressed,))
    about: dict[str, Any] = {
        "phases_s": {"forward": 0.1}, "anomalies": {"straggler": 1}, "step_counts": {400: 7},
    }  # fmt: skip
    agent.runs = [RunSummary("uid/1000", "llama-7b", "r1", NOW, NOW - 60, ranks=(0, 1), **about)]
