"""Checks every value of the daemon against nvidia-smi, on an idle and on a busy GPU."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu import nvidia_smi
from benchmarks.gpu.counters import running
from benchmarks.gpu.nvidia_smi import ABSENT, AGREE, BETWEEN, DIFFERS, THEIRS_ONLY, Leaves
from benchmarks.gpu.report import Report
from benchmarks.processes import running_daemon, wait_until

# After this time every reader has read once; GPM needs two rounds.
ROUNDS_S, QUICK_ROUNDS_S = 3.0, 1.2
# The texts that describe a device: our label, and nvidia-smi's path.
FACTS = {
    "name": "product_name",
    "driver_version": "driver_version",
    "pci_bus_id": "pci/pci_bus_id",
    "vbios_version": "vbios_version",
    "serial": "serial",
    "architecture": "product_architecture",
}


def check_readers(report: Report) -> None:
    rounds_s = QUICK_ROUNDS_S if report.setting.quick else ROUNDS_S
    with report.part("values") as figures:
        figures["devices"] = [device["values"] for device in read_daemon(rounds_s)]
        counts = ", ".join(str(len(values)) for values in figures["devices"])
        report.expect(bool(counts), f"values that the daemon reads of each GPU: {counts or 'none'}")
    for load in ("idle", "matmul"):
        with report.part(load) as figures:
            with running(load, report.setting):
                before = nvidia_smi.read()
                devices = read_daemon(rounds_s)
                after = nvidia_smi.read()
            for device in devices:
                found = compare(device, before[device["uuid"]], after[device["uuid"]])
                figures[str(device["index"])] = found
                state(report, f"GPU {device['index']} {load}", found)


def read_daemon(rounds_s: float) -> list[dict[str, Any]]:
    """Return the devices after the first rounds of a new daemon."""
    with running_daemon() as daemon:
        wait_until(lambda: daemon.devices())
        time.sleep(rounds_s)
        return daemon.devices()


def compare(device: Mapping[str, Any], before: Leaves, after: Leaves) -> dict[str, Any]:
    """Compare our reading with nvidia-smi's right before and after it."""
    ours, facts = device["values"], device["info"] | {"name": device["name"]}
    table = nvidia_smi.readings()
    rows = []
    for reading in table:
        value, theirs = ours.get(reading.series), (reading.text(before), reading.text(after))
        verdict = nvidia_smi.verdict(reading, value, *theirs)
        rows.append({"series": reading.series, "ours": value, "theirs": theirs, "verdict": verdict})
    known = {path for reading in table for path in reading.paths} | {*FACTS.values(), "uuid"}
    texts = {path: text for path, text in after.items() if text not in ABSENT}
    return {
        "rows": rows,
        # Only the names are kept: some texts identify the machine.
        "facts_that_differ": [
            label
            for label, path in FACTS.items()
            if path in texts and facts.get(label, "").lower() != texts[path].lower()
        ],
        "only_ours": sorted(ours.keys() - {reading.series for reading in table}),
        "only_theirs": sorted(texts.keys() - known),
    }


def state(report: Report, what: str, found: dict[str, Any]) -> None:
    verdicts = Counter(row["verdict"] for row in found["rows"])
    report.fact(f"{what}: " + ", ".join(f"{n} {verdict}" for verdict, n in verdicts.most_common()))
    for row in found["rows"]:
        text = f"{row['verdict']}: {row['series']} = {row['ours']}, theirs {row['theirs']}"
        if row["verdict"] in (DIFFERS, THEIRS_ONLY):
            report.expect(False, text)
        elif row["verdict"] not in (AGREE, BETWEEN):
            report.fact(text)
    differing = ", ".join(found["facts_that_differ"])
    report.expect(not differing, f"{what}: facts that differ: {differing or 'none'}")
    for key in ("only_ours", "only_theirs"):
        names = dict.fromkeys(name.partition("{")[0] for name in found[key])
        report.fact(f"{what}: {key.replace('_', ' ')}: {', '.join(names) or 'none'}")
