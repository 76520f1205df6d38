"""What the shim costs a training on the GPU, and whether its step times are true."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.gpu.check import CannotCheck, Finding, Part, Setting, need_torch
from benchmarks.gpu.node import Node, running_node

TURNS, STEPS = 21, {"small": 300, "large": 60}
TIMED_STEPS = 100
TIMEOUT_S = 60.0
MAX_ADDED_US = 50.0
# CUDA events resolve about half a microsecond; between ours and the shim's lie a few calls.
MAX_ERROR_S = 100e-6
MAX_ERROR_RATIO = 0.01


def parts(setting: Setting) -> Iterator[Part]:
    for size in STEPS:
        yield Part(size, _overhead(setting, size), overhead_findings)
    yield Part("times", lambda: times(setting), time_findings)


def program(node: Node, module: str, *arguments: str) -> Any:
    """The JSON that a program beside the daemon prints. Raises RuntimeError with its last line."""
    answer = subprocess.run(
        [sys.executable, "-m", f"benchmarks.gpu.{module}", *arguments],
        env=node.training_environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or ["nothing was said"]
        raise RuntimeError(f"{module} ended with {answer.returncode}: {lines[-1]}")
    return json.loads(answer.stdout.splitlines()[-1])


def _overhead(setting: Setting, size: str) -> Any:
    return lambda: overhead(setting, size)


def overhead(setting: Setting, size: str) -> Any:
    need_torch(setting)
    turns, steps = setting.count(TURNS, 3), setting.count(STEPS[size], 20)
    with running_node() as node:
        return program(node, "step_loops", size, setting.device, str(turns), str(steps))


def overhead_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    plain, shim = measured["loops"]["plain"], measured["loops"]["shim"]
    added_us = shim["step_us"] - plain["step_us"]
    text = f"{measured['size']} steps of {plain['step_us']:.0f} µs: the shim adds {added_us:.1f} µs"
    text += f" ({100 * added_us / plain['step_us']:.2f} %), issuing takes"
    text += f" {shim['issued_us'] - plain['issued_us']:.1f} µs longer"
    yield Finding(added_us <= MAX_ADDED_US, text)
    if "profiled" not in measured:
        return
    before, after = measured["profiled"]["plain"], measured["profiled"]["shim"]
    text = f"calls that wait for the GPU: {before['synchronizing']} without, "
    text += f"{after['synchronizing']} with the shim; it calls {after['calls']}"
    yield Finding(after["synchronizing"] <= before["synchronizing"], text)
    text = f"GPU busy {before['gpu_busy_ratio']:.3f} without, {after['gpu_busy_ratio']:.3f} with it"
    yield Finding(None, text)


def times(setting: Setting) -> dict[str, Any]:
    """Our step records against the program's own events. Raises CannotCheck."""
    need_torch(setting)
    if setting.device != "cuda":
        raise CannotCheck("there are no CUDA events on the CPU")
    with running_node() as node:
        truth = program(node, "timed_steps", str(setting.count(TIMED_STEPS, 20)))
        with (node.folder / "log.jsonl").open(encoding="utf-8") as log:
            records = [json.loads(line) for line in log if line.endswith("\n")]
    ours = {str(r["step"]): r for r in records if r["type"] == "step"}
    return {
        "steps": len(truth),
        "reported": sum(1 for step in truth if step in ours),
        **{what: _errors(truth, ours, what) for what in ("duration_s", "gpu_s")},
    }


def _errors(truth: dict[str, Any], ours: dict[str, Any], what: str) -> dict[str, Any]:
    pairs = [
        (ours[step][what], expected[what])
        for step, expected in truth.items()
        if what in ours.get(step, {})
    ]
    if not pairs:
        return {"compared": 0}
    errors_s = [abs(value - expected) for value, expected in pairs]
    return {
        "compared": len(pairs),
        "median_s": statistics.median(expected for _, expected in pairs),
        "longest_s": max(expected for _, expected in pairs),
        "median_error_s": statistics.median(errors_s),
        "largest_error_s": max(errors_s),
        "beyond": sum(
            1
            for value, expected in pairs
            if abs(value - expected) > max(MAX_ERROR_S, MAX_ERROR_RATIO * expected)
        ),
    }


def time_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    for what in ("duration_s", "gpu_s"):
        errors = measured[what]
        if not errors["compared"]:
            yield Finding(False, f"{what}: none of {measured['steps']} steps has it")
            continue
        text = f"{what} of {errors['compared']} steps ({errors['median_s'] * 1e3:.2f} ms): median"
        text += f" error {errors['median_error_s'] * 1e6:.1f} µs, largest"
        text += f" {errors['largest_error_s'] * 1e6:.1f} µs, beyond the limit {errors['beyond']}"
        # A step in which the kernel took the CPU away between two events is no fault.
        yield Finding(errors["beyond"] <= 0.05 * errors["compared"], text)
