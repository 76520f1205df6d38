"""Measures what an inference server costs: the hooks in an iteration, and the agent beside it.

The server is the stand-in for vLLM of the tests, whose methods take no time: what the hooks add to
them is the difference to turns with the original methods, in the same process. Between iterations
the thread reads some MiB, so that the processor's caches hold little of the hooks' code.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.agent import JOB, RANKS, ranks_beside
from benchmarks.processes import at_most, core_percents, is_quick, output_of, running_daemon

ROOT = Path(__file__).resolve().parents[1]
ITERATIONS_PER_S = 200
REQUESTS = 64
# 1 % of an iteration of 5 ms.
MAX_ADDED_US = 50.0
MAX_CORE_PERCENT = 10.0
WINDOW_S, QUICK_WINDOW_S = 60.0, 10.0
SETTLE_S = 5.0
TIMEOUT_S = 300.0

_HOOKED = f"""
import hashlib, inspect, json, statistics, sys, time
from engine_config import config
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.engine.llm_engine import LLMEngine
engine = LLMEngine(config())
parts = [(type(engine.scheduler), ("schedule", "update_from_output"))]
parts += [(type(engine.worker), ("execute_model", "sample_tokens"))]
hooked = [(owner, name, getattr(owner, name)) for owner, names in parts for name in names]
for number in range({REQUESTS}):
    engine.add(str(number), 500, 10**9)

block = bytes(4 << 20)

def turn(on):
    for owner, name, method in hooked:
        setattr(owner, name, method if on else inspect.unwrap(method))
    times_s = []
    for _ in range(100):
        hashlib.sha256(block).digest()
        began = time.thread_time()
        engine.step()
        times_s.append(time.thread_time() - began)
    return statistics.median(times_s)

turn(True), turn(False)
pairs = [(turn(False), turn(True)) for _ in range(int(sys.argv[1]))]
without, added = (statistics.median(x) for x in zip(*((a, b - a) for a, b in pairs)))
print(json.dumps({{"iteration_us": without * 1e6, "added_us": added * 1e6}}))
"""
_WORKER = f"""
import os, time, warpwatch
rank = int(os.environ["RANK"])
place = {{"rank": rank, "world_size": {RANKS}, "run": "r"}}
place["parallel"] = {{"tensor": [rank, {RANKS}]}}
monitor = warpwatch.attach(job="{JOB}", kind="serve", place=place)
due = time.monotonic()
while True:
    with monitor.iteration(decode_requests=32, kv_tokens=20000, after_idle=False):
        with monitor.phase("forward"):
            due += {1 / ITERATIONS_PER_S}
            time.sleep(max(0.0, due - time.monotonic()))
"""


def measure() -> dict[str, Any]:
    """Return the figures. Raises CannotMeasure."""
    window_s = QUICK_WINDOW_S if is_quick() else WINDOW_S
    with running_daemon(sources={"nvml": {"enabled": False}}) as daemon:
        hooks = _hooks(daemon.training_environment)
        with ranks_beside(daemon, _WORKER):
            time.sleep(SETTLE_S)
            percent = core_percents({JOB: daemon.pid}, lambda: time.sleep(window_s))[JOB]
    what = f"percent of a core for {RANKS} ranks at {ITERATIONS_PER_S} iterations per second"
    return {
        "requests": REQUESTS,
        "window_s": window_s,
        **hooks,
        "limits": [
            at_most("µs of the processor added to an iteration", hooks["added_us"], MAX_ADDED_US),
            at_most(what, round(percent, 2), MAX_CORE_PERCENT),
        ],
    }


def _hooks(environment: dict[str, str]) -> dict[str, float]:
    folders = ("client/warpwatch/bootstrap", "client", "tests/client/servers")
    path = os.pathsep.join(str(ROOT / folder) for folder in folders)
    turns = "3" if is_quick() else "15"
    figures: dict[str, float] = output_of(
        "hooks", ["-c", _HOOKED, turns], environment | {"PYTHONPATH": path}, TIMEOUT_S
    )
    return {name: round(value, 1) for name, value in figures.items()}
