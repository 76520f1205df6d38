"""Every value of the daemon against nvidia-smi, of an idle and of a busy GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.gpu import nvidia_smi
from benchmarks.gpu.check import Finding, Part, Setting, need_nvidia_smi, need_torch
from benchmarks.gpu.comparison import (
    DIFFERS,
    NOT_COMPARABLE,
    OURS_ONLY,
    THEIRS_ONLY,
    compare,
    compare_facts,
)
from benchmarks.gpu.loads import running
from benchmarks.gpu.node import running_node
from benchmarks.processes import wait_until

# GPM needs two rounds; by then everything else was read once.
ROUNDS_S = 3.0
_PREFIX = "device_"


def parts(setting: Setting) -> Iterator[Part]:
    yield Part("values", lambda: values(setting.seconds(ROUNDS_S, 1.2)), value_findings)
    yield Part("idle", compare_idle, comparison_findings)
    yield Part("busy", lambda: compare_busy(setting), comparison_findings)


def read_daemon(rounds_s: float = ROUNDS_S) -> list[dict[str, Any]]:
    """The devices after the first rounds of a fresh daemon, in which every reader has read once."""
    with running_node() as node:
        wait_until(node.devices)
        time.sleep(rounds_s)
        return [device | {"values": plain(device["values"])} for device in node.devices()]


def plain(values: dict[str, float]) -> dict[str, float]:
    return {series.removeprefix(_PREFIX): value for series, value in values.items()}


def values(rounds_s: float) -> dict[str, Any]:
    devices = read_daemon(rounds_s)
    return {
        "devices": [
            {"values": device["values"], "processes": len(device["processes"])}
            for device in devices
        ]
    }


def value_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    for index, device in enumerate(measured["devices"]):
        yield Finding(None, f"GPU {index}: {len(device['values'])} values are read")
    if not measured["devices"]:
        yield Finding(False, "the daemon reads no device")


def compare_idle() -> dict[str, Any]:
    return compare_devices(need_nvidia_smi())


def compare_busy(setting: Setting) -> dict[str, Any]:
    path = need_nvidia_smi()
    need_torch(setting)
    with running("matmul", setting.device):
        time.sleep(2)
        return compare_devices(path)


def compare_devices(path: str) -> dict[str, Any]:
    before = nvidia_smi.read(path)
    devices = read_daemon()
    after = nvidia_smi.read(path)
    return {
        str(device["index"]): {
            **compare(device["values"], before[device["uuid"]], after[device["uuid"]]),
            "facts": compare_facts(
                {**device["info"], "name": device["name"]}, after[device["uuid"]]
            ),
        }
        for device in devices
        if device["uuid"] in before and device["uuid"] in after
    }


def comparison_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    if not measured:
        yield Finding(False, "no device is known to both")
    for index, found in measured.items():
        verdicts = found["verdicts"]
        counts = ", ".join(f"{count} {name}" for name, count in sorted(verdicts.items()))
        yield Finding(
            DIFFERS not in verdicts and THEIRS_ONLY not in verdicts, f"GPU {index}: {counts}"
        )
        for row in found["rows"]:
            if row["verdict"] in (DIFFERS, NOT_COMPARABLE, THEIRS_ONLY, OURS_ONLY):
                ok = None if row["verdict"] in (OURS_ONLY, NOT_COMPARABLE) else False
                theirs = " then ".join(str(text) for text in row["theirs"])
                text = f"{row['verdict']}: {row['series']} = {row['ours']}, theirs {theirs}"
                yield Finding(ok, text)
        bad = [label for label, verdict in found["facts"].items() if verdict == DIFFERS]
        yield Finding(not bad, f"facts that differ: {', '.join(bad) or 'none'}")
        more = found["only_in_nvidia_smi"]
        yield Finding(None, f"only nvidia-smi has {len(more)}: {', '.join(more)}")
        more = found["not_in_nvidia_smi"]
        yield Finding(None, f"only we have {len(more)}: {', '.join(more)}")
