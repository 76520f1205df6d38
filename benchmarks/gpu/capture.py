"""The whole loop on the GPU: a fault, its anomaly, the capture, the verdict; traces are kept."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import traces
from benchmarks.gpu.check import Finding, Part, Setting, need_torch
from benchmarks.gpu.node import Node, last_line, running_node
from warpwatch_daemon.demo.faults import NONE, Switch
from warpwatch_diagnosis.rules import RULES
from warpwatch_telemetry.errors import WarpwatchError

JOB = "gpu-check"
STEPS = 3
START_TIMEOUT_S = 60.0
BASELINE_S = 16.0
FOUND_TIMEOUT_S = 40.0
CAPTURE_TIMEOUT_S = 60.0
# A new fault is seen in a capture only when the steps that are recorded have it.
SETTLE_S = 1.5
# What each fault should be called; judged as soon as there is a rule that can say so.
VERDICTS = {
    NONE: "healthy",
    "item": "sync_bound",
    "pageable": "transfer_bound",
    "data_stall": "data_loading",
}


@dataclass(frozen=True, slots=True)
class Trained:
    """The daemon, and the training beside it with a switch for its faults."""

    node: Node
    switch: Switch
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        if self.process.poll() is not None:
            ending = f"ended with {self.process.returncode}: {last_line(self.log)}"
            raise RuntimeError(f"the training {ending}")

    def poll(self, ask: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """The first answer that says something. Raises TimeoutError, RuntimeError."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check()
            with contextlib.suppress(WarpwatchError):
                answer = ask()
                if answer:
                    return answer
            time.sleep(0.1)
        raise TimeoutError(f"not within {timeout_s:.0f} s: {what}; {last_line(self.log)}")


def parts(setting: Setting) -> Iterator[Part]:
    # One after the other with one daemon and one training, which begin with the first part.
    with contextlib.ExitStack() as stack:
        started: list[Trained] = []

        def trained() -> Trained:
            need_torch(setting)
            if not started:
                started.append(stack.enter_context(training(setting)))
            return started[0]

        yield Part("data_stall", lambda: anomaly(trained(), setting), capture_findings)
        for fault in ("item", "pageable", NONE):
            yield Part(fault, _asked(trained, fault, setting), capture_findings)


@contextlib.contextmanager
def training(setting: Setting) -> Iterator[Trained]:
    with running_node() as node:
        stop, log = node.folder / "stop", node.folder / "training.log"
        switch = Switch(node.folder / "fault")
        switch.set(NONE)
        command = ["-m", "benchmarks.gpu.training", str(node.folder / "fault"), str(stop)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command, setting.device],
                env=node.training_environment,
                stdout=output,
                stderr=output,
            )
        try:
            yield Trained(node, switch, process, log)
        finally:
            stop.touch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


# --- one fault ---


def anomaly(trained: Trained, setting: Setting) -> dict[str, Any]:
    """A stall of the data that the daemon finds by itself, and asks for the capture by itself."""
    api = trained.node.api
    trained.poll(lambda: _baseline(trained.node), START_TIMEOUT_S, "a baseline of healthy steps")
    healthy_s = _step_s(trained.node)
    began = time.time()
    trained.switch.set("data_stall")

    def found() -> Any:
        anomalies = api.get("/api/v1/anomalies")["anomalies"]
        return next((a for a in anomalies if a["kind"] == "data_stall"), None)

    anomaly = trained.poll(found, FOUND_TIMEOUT_S, "an anomaly of kind data_stall")

    def captured() -> Any:
        captures = api.get("/api/v1/captures")["captures"]
        mine = [c for c in captures if c["request"]["anomaly_kind"] == "data_stall"]
        return next((c for c in mine if _done(c)), None)

    capture = trained.poll(captured, CAPTURE_TIMEOUT_S, "its capture")
    return {
        "fault": "data_stall",
        "found_after_s": round(anomaly["time"] - began, 1),
        "summary": anomaly["summary"],
        "healthy_step_s": healthy_s,
        **_captured(trained, capture, "data_stall", setting),
    }


def _asked(trained: Callable[[], Trained], fault: str, setting: Setting) -> Any:
    return lambda: asked(trained(), fault, setting)


def asked(trained: Trained, fault: str, setting: Setting) -> dict[str, Any]:
    """A capture that somebody asks for while the fault is on."""
    api = trained.node.api
    trained.switch.set(fault)
    time.sleep(SETTLE_S)
    body = {"job": JOB, "kind": "torch", "steps": STEPS, "reason": f"fault {fault}"}
    # While another capture runs, this one is refused.
    asked = trained.poll(lambda: api.post("/api/v1/captures", body), CAPTURE_TIMEOUT_S, "to ask")

    def captured() -> Any:
        capture = api.get(f"/api/v1/captures/{asked['id']}")
        return capture if _done(capture) else None

    capture = trained.poll(captured, CAPTURE_TIMEOUT_S, f"the capture of {fault}")
    return {"fault": fault, **_captured(trained, capture, fault, setting)}


def _baseline(node: Node) -> bool:
    """Whether the detectors have seen healthy steps long enough."""
    ranks = [rank for rank in node.api.get("/api/v1/ranks")["ranks"] if rank["job"] == JOB]
    return any(
        rank["step"] is not None
        and rank["step"] >= 100
        and time.time() - rank["first_time"] >= BASELINE_S
        for rank in ranks
    )


def _step_s(node: Node) -> float | None:
    """The newest step of the training."""
    ranks = node.api.get("/api/v1/ranks")["ranks"]
    return next((r["recent_s"][-1] for r in ranks if r["job"] == JOB and r["recent_s"]), None)


def _done(capture: Any) -> bool:
    ended = capture["outcome"] is not None
    return ended and (capture["diagnosis_outcome"] is not None or capture["outcome"] != "complete")


def _captured(trained: Trained, capture: Any, fault: str, setting: Setting) -> dict[str, Any]:
    diagnosis = capture["diagnosis"] or {}
    answer = {
        "outcome": capture["outcome"],
        "detail": capture["detail"],
        "step_s": capture["step_s"],
        "took_s": round((capture["end_time"] or time.time()) - capture["time"], 2),
        "diagnosis_outcome": capture["diagnosis_outcome"],
        "verdict": diagnosis.get("verdict"),
        "expected": VERDICTS[fault],
        "findings": diagnosis.get("findings", []),
        "time": [trace["time"] for trace in diagnosis.get("traces", [])],
    }
    try:
        answer["trace"] = _keep_trace(trained.node.folder / "captures", capture, fault, setting.out)
    except (OSError, ValueError) as error:
        answer["trace"] = {"error": str(error)[:200]}
    return answer


def _keep_trace(store: Path, capture: Any, fault: str, out: Path) -> dict[str, Any]:
    name = next((file for file in capture["files"] if file.endswith(".pt.trace.json.gz")), None)
    found = next(store.rglob(f"{capture['id']}/{name}"), None) if name else None
    if found is None:
        raise ValueError("the capture has no trace")
    return traces.keep(found, out / "traces" / f"{fault}.pt.trace.json.gz")


def capture_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    fault, verdict, expected = (measured[key] for key in ("fault", "verdict", "expected"))
    if "found_after_s" in measured:
        yield Finding(
            True, f"{fault} found after {measured['found_after_s']} s: {measured['summary']}"
        )
    complete = measured["outcome"] == "complete"
    text = f"capture of {fault}: {measured['outcome']} {measured['detail']}".rstrip()
    yield Finding(complete, f"{text} in {measured['took_s']} s, step times {measured['step_s']}")
    known = expected == "healthy" or expected in {rule.kind for rule in RULES}
    judged = (verdict == expected) if known else None
    unknown = "" if known else ", for which there is no rule yet"
    yield Finding(judged, f"verdict of {fault}: {verdict}, expected {expected}{unknown}")
    yield Finding(None, f"trace of {fault}: {measured['trace']}")
