"""NCCL's environment: of this shell, of /etc/nccl.conf, and of the processes on the GPUs.

Of other people's processes only variables of `nccl_variables` are looked at, and only those that
are suspicious are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from warpwatch_daemon.doctor.check import Check, CheckInputs, listed
from warpwatch_daemon.doctor.facts import Survey
from warpwatch_daemon.doctor.machine import Machine
from warpwatch_daemon.doctor.nccl_variables import NAMES, VARIABLES, NodeNetwork, Variable

_CONFIGURATION = "/etc/nccl.conf"
# The inode of the first PID namespace (PROC_PID_INIT_INO): only there are NVML's PIDs ours.
_HOST_PIDS = "pid:[4026531836]"
_MOST_PROCESSES = 1024
_LONGEST_VALUE = 60
_MOST_OWNERS = 3


@dataclass(frozen=True, slots=True)
class Environment:
    """Whose, and those of its variables that we know."""

    owner: str
    values: Mapping[str, str]
    network: NodeNetwork


def checks(inputs: CheckInputs) -> Iterator[Check]:
    environments, unreadable = _environments(inputs.machine, inputs.survey)
    owners: dict[tuple[Variable, str, str], list[str]] = {}
    for environment in environments:
        for key in _suspicious(environment):
            owners.setdefault(key, []).append(environment.owner)
    for (variable, name, value), whose in owners.items():
        detail = f"set to {_shown(value)} ({listed(whose, _MOST_OWNERS)}): {variable.meaning}"
        yield Check(name, variable.ok, detail, variable.advice)
    looked = ["this shell"]
    processes = sum(1 for each in environments if each.owner.startswith("pid "))
    if processes:
        looked.append(f"{processes} processes on GPUs" if processes > 1 else "1 process on a GPU")
    if not owners:
        yield Check("environment", True, f"nothing suspicious in {' and '.join(looked)}")
    if unreadable:
        detail = f"of {unreadable} processes on GPUs it cannot be read"
        yield Check(
            "environment", None, detail, "sudo warpwatch doctor, in the host's PID namespace"
        )


def _shown(value: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in value)[:_LONGEST_VALUE]


def _suspicious(environment: Environment) -> Iterator[tuple[Variable, str, str]]:
    for variable in VARIABLES:
        for name in variable.names:
            value = environment.values.get(name)
            if value is not None and variable.suspicious(value, environment.network):
                yield variable, name, value


def _environments(machine: Machine, survey: Survey) -> tuple[list[Environment], int]:
    """All that can be read, and how many processes cannot."""
    adapters = frozenset(machine.names("/sys/class/infiniband"))
    here = NodeNetwork(_interfaces(machine, "self"), adapters)
    own = {name: machine.environ[name] for name in NAMES & machine.environ.keys()}
    found = [Environment("this shell", own, here)]
    settings = machine.text(_CONFIGURATION)
    if settings is not None:
        found.append(Environment(_CONFIGURATION, _known(settings.splitlines()), here))
    unreadable = 0
    for pid in _gpu_processes(machine, survey)[:_MOST_PROCESSES]:
        text = machine.text(f"/proc/{pid}/environ")
        if text is None:
            unreadable += machine.path(f"/proc/{pid}").exists()
            continue
        network = NodeNetwork(_interfaces(machine, str(pid)), adapters)
        found.append(Environment(f"pid {pid}", _known(text.split("\0")), network))
    return found, unreadable


def _known(assignments: list[str]) -> dict[str, str]:
    pairs = (assignment.strip().partition("=") for assignment in assignments)
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip() in NAMES}


def _interfaces(machine: Machine, process: str) -> frozenset[str] | None:
    """The network interfaces that a process sees."""
    text = machine.text(f"/proc/{process}/net/dev")
    if text is None:
        return None
    return frozenset(line.partition(":")[0].strip() for line in text.splitlines() if ":" in line)


def _gpu_processes(machine: Machine, survey: Survey) -> list[int]:
    """PIDs in our namespace; the driver knows those of the host only."""
    if machine.link("/proc/self/ns/pid") == _HOST_PIDS:
        pids = {pid for device in survey.up for pid in device.processes or ()}
        return sorted(pids)
    return [pid for pid in _pids(machine) if _has_gpu_open(machine, pid)]


def _pids(machine: Machine) -> list[int]:
    return sorted(int(name) for name in machine.names("/proc") if name.isdigit())


def _has_gpu_open(machine: Machine, pid: int) -> bool:
    folder = f"/proc/{pid}/fd"
    targets = (machine.link(f"{folder}/{name}") or "" for name in machine.names(folder))
    return any(target.removeprefix("nvidia").isdigit() for target in targets)
