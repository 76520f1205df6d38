"""The groups of checks, in the order in which they are shown. A new group is one line here."""

from __future__ import annotations

from dataclasses import replace

from warpwatch_daemon.doctor import (
    agent,
    daemon,
    devices,
    driver,
    host,
    kernel_log,
    nccl,
    schedulers,
    topology,
)
from warpwatch_daemon.doctor.check import Check, CheckInputs, Group

GROUPS: dict[str, Group] = {
    "daemon": daemon.checks,
    "agent": agent.checks,
    "driver": driver.checks,
    "devices": devices.checks,
    "kernel log": kernel_log.checks,
    "topology": topology.checks,
    "host": host.checks,
    "NCCL": nccl.checks,
    "schedulers": schedulers.checks,
}


def examine(inputs: CheckInputs) -> list[Check]:
    """Return what all groups find; of a daemon elsewhere only what that daemon reports."""
    groups = GROUPS if inputs.here else {"daemon": daemon.checks}
    return [
        replace(check, group=name) for name, checks in groups.items() for check in checks(inputs)
    ]
