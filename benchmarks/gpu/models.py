"""What the shim costs real networks: eager, compiled and as a CUDA graph; what waiting costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.gpu.check import CannotCheck, Finding, Part, Setting, need_torch
from benchmarks.gpu.node import running_node
from benchmarks.gpu.shim import program

# Of networks.py, which imports torch.
NETWORKS, MODES = ("gpt", "resnet"), ("eager", "compile", "graph")
TURNS, STEPS = 15, 20
# Percent of a step: of ordinary ones, and of those of 10 ms and less.
MAX_PERCENT, MAX_SHORT_PERCENT = 0.3, 1.0
SHORT_STEP_US = 10_000.0


def parts(setting: Setting) -> Iterator[Part]:
    for network in NETWORKS:
        for mode in MODES:
            yield Part(f"{network}_{mode}", _measured(setting, network, mode), findings)


def _measured(setting: Setting, network: str, mode: str) -> Callable[[], Any]:
    def measure() -> Any:
        need_torch(setting)
        if mode == "graph" and setting.device != "cuda":
            raise CannotCheck("there are no CUDA graphs on the CPU")
        turns, steps = setting.count(TURNS, 3), setting.count(STEPS, 3)
        with running_node() as node:
            arguments = (network, mode, setting.device, str(turns), str(steps))
            return program(node, "model_loops", *arguments)

    return measure


def findings(measured: dict[str, Any]) -> Iterable[Finding]:
    loops, name = measured["loops"], f"{measured['network']} {measured['mode']}"
    plain_us = loops["plain"]["step_us"]
    limit = MAX_SHORT_PERCENT if plain_us <= SHORT_STEP_US else MAX_PERCENT
    shim = loops["shim"]
    low, high = shim["added_percent_95"]
    text = f"{name}, {plain_us / 1e3:.2f} ms a step: the shim adds {shim['added_percent']:.2f} %"
    yield Finding(low <= limit, f"{text} ({low:.2f} to {high:.2f}; at most {limit})")
    waiting = loops["synchronized"]["added_percent"]
    yield Finding(None, f"{name}: waiting for the GPU at both ends adds {waiting:.2f} %")
