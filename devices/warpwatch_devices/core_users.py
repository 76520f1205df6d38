"""Who used the cores that a process may run on, by the processor time taken between two looks.

Every process is read in a look, so there are two of them when somebody asks, and then none for a
while. It is told by processor time: whether the other ran at the very moment is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from warpwatch_devices.attribution.control_groups import read_owner
from warpwatch_devices.memory_groups import PROC, field, read_text
from warpwatch_devices.process_tree import Process, list_pids, read_process
from warpwatch_devices.processor_waits import parse_cores

# After two looks, as reading 4,000 processes takes 0.1 s; the shorter where waiting has risen.
PAUSE_S, SHORT_PAUSE_S = 30.0, 4.0
# Of a core; who uses less takes nothing from anybody.
MIN_CORES = 0.05
# Whose cores and owner are looked at, and of how many is told.
MAX_LOOKED_AT = 32
MAX_TOLD = 3

Identity = tuple[int, int]


class Use(NamedTuple):
    """``cores``: processor time over time, of the process and the children that it waited for."""

    process: Process
    cores: float


class ProcessorUse:
    """All processes, looked at twice in a row when somebody waits for a core."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._before: dict[Identity, Process] | None = None
        self._before_at = 0.0
        self._looked_at = float("-inf")

    def look(self, at: float, wanted: bool, risen: bool = False) -> list[Use]:
        """Who used processors since the look before, most first; empty where that was none.

        at: monotonic time. risen: what was told last says nothing of now.
        """
        if self._before is None:
            pause_s = SHORT_PAUSE_S if risen else PAUSE_S
            if wanted and at >= self._looked_at + pause_s:
                self._before, self._before_at = self._read(), at
            return []
        before, self._before = self._before, None
        self._looked_at = at
        return uses(before, self._read(), at - self._before_at)

    def _read(self) -> dict[Identity, Process]:
        read = (read_process(pid, self._proc) for pid in list_pids(self._proc))
        return {process.identity: process for process in read if process is not None}


def uses(
    before: Mapping[Identity, Process], now: Mapping[Identity, Process], passed_s: float
) -> list[Use]:
    """Of MIN_CORES and more. What ended meanwhile is its parent's, if that waited for it."""
    if passed_s <= 0:
        return []
    # A parent gets all that a child ever used; what that had at the first look is no news.
    ended_s: dict[int, float] = {}
    for identity, process in before.items():
        if identity not in now:
            used_s = process.cpu_s + process.waited_s
            ended_s[process.parent] = ended_s.get(process.parent, 0.0) + used_s
    found = []
    for identity, process in now.items():
        old = before.get(identity)
        own_s = process.cpu_s - (old.cpu_s if old else 0.0)
        waited_s = process.waited_s - (old.waited_s if old else 0.0)
        waited_s = max(0.0, waited_s - ended_s.get(process.pid, 0.0))
        if own_s + waited_s >= MIN_CORES * passed_s:
            found.append(Use(process, (own_s + waited_s) / passed_s))
    return sorted(found, key=lambda use: -use.cores)


@dataclass(frozen=True, slots=True)
class CoreUser:
    """``name`` is None where the owner of the process whose cores they are may not know it.

    core: the only one that it may run on, None where there are several.
    """

    pid: int
    cores: float
    name: str | None
    core: int | None


def core_users(pid: int, owner_uid: int, uses: Iterable[Use], proc: Path = PROC) -> list[CoreUser]:
    """Who used the cores that ``pid`` may run on, most first; itself where it took above one.

    Who may run on no others comes before who was seen there. Named are kernel threads, and
    processes of ``owner_uid`` in the same pod or outside of all as ``pid`` is; whose a process of
    another user namespace is cannot be known.
    """
    cores, pod_uid = allowed_cores(pid, proc), _pod_uid(pid, proc)
    confined, seen_there = [], []
    for process, used in list(uses)[:MAX_LOOKED_AT]:
        own = allowed_cores(process.pid, proc)
        if not cores & own or (process.pid == pid and used <= 1.0 + MIN_CORES):
            continue
        is_same = _uid(process.pid, proc) == owner_uid and _pod_uid(process.pid, proc) == pod_uid
        is_named = process.is_kernel or (is_same and pod_uid is not None)
        core = min(own) if len(own) == 1 else None
        user = CoreUser(process.pid, round(used, 3), process.name if is_named else None, core)
        if own <= cores:
            confined.append(user)
        elif process.threads > 1 or process.core in cores:
            seen_there.append(user)
    return (confined + seen_there)[:MAX_TOLD]


def allowed_cores(pid: int, proc: Path = PROC) -> frozenset[int]:
    """That its main thread may run on; empty where the process is gone."""
    text = read_text(proc / str(pid) / "status")
    return parse_cores(text.partition("\nCpus_allowed_list:")[2].partition("\n")[0])


def _uid(pid: int, proc: Path) -> int | None:
    uid = field(read_text(proc / str(pid) / "status"), "Uid:")
    # All users of another user namespace look like this one.
    overflow = read_text(proc / "sys/kernel/overflowuid").strip()
    return None if str(uid) == overflow else uid


def _pod_uid(pid: int, proc: Path) -> str | None:
    """Empty outside of pods, None where it is not known."""
    owner = read_owner(pid, "", proc)
    return None if owner is None else owner.pod_uid
