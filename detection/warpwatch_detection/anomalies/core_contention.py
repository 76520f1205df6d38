"""Finds out whether a slow rank lacked a processor core, and adds the evidence to its anomaly.

Every 2 s the daemon reports how long each rank waited for a core (events ``process``). If a
straggler waits longer than its peers, or the ranks of a slow job longer than usual, the anomaly
has a sentence about it. This is evidence, not a cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from warpwatch_detection.detector import detail_number
from warpwatch_detection.ranks import RankDevices
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import RankEvent

KINDS = frozenset({"straggler", "step_regression"})
# Names in the detail of an event, the most specific first: a CPU limit or the hypervisor also
# makes a rank wait for a core.
SHARES = ("throttled_share", "steal_share", "core_wait_share")
# A share counts if it is this much above its reference: 0.05 is 5 % of the time.
MIN_EXCESS = 0.05
# A share is the mean of this many polls.
POLLS = 3
MAX_AGE_S = 15.0
# All processes are polled every 30 s.
MAX_USERS_AGE_S = 60.0
# The weight of a poll in the usual share; it is larger for the first ones, at a process's start.
USUAL_WEIGHT = 0.02
MAX_USERS = 3
# More cores in an event are invalid input.
MAX_CORES = 1e6
# The kernel's own limit is 15.
MAX_NAME = 16


class Evidence(NamedTuple):
    """A sentence for the anomaly. The evidence with the larger ``weight`` is shown."""

    weight: float
    sentence: str


NONE = Evidence(0.0, "")


@dataclass(slots=True)
class RankCores:
    """The waits of one rank for a core.

    looks: the shares in the newest of ``count`` polls. usual: the slow mean of each share, without
    high values. limit: the CPU limit in cores. users: the text of the processes on its cores at
    users_time, when its core_wait_share was users_share.
    """

    time: float = float("-inf")
    looks: list[dict[str, float]] = field(default_factory=list)
    usual: dict[str, float] = field(default_factory=dict)
    count: int = 0
    limit: float | None = None
    users: str = ""
    users_time: float = float("-inf")
    users_share: float = 0.0

    def share(self, name: str) -> float | None:
        known = [poll[name] for poll in self.looks if name in poll]
        return sum(known) / len(known) if known else None

    def add(self, seen: RankEvent) -> None:
        shares = {n: s for n in SHARES if (s := detail_number(seen, n)) is not None}
        self.count += 1
        weight = max(USUAL_WEIGHT, 1 / self.count)
        for name, share in shares.items():
            usual = self.usual.setdefault(name, share)
            if share < usual + MIN_EXCESS:
                self.usual[name] = usual + weight * (share - usual)
        self.looks = [*self.looks[1 - POLLS :], shares]
        self.limit, self.time = detail_number(seen, "core_limit"), seen.time
        users = seen.detail.get("core_users")
        if isinstance(users, list):
            self.users, self.users_time = users_text(users), seen.time
            self.users_share = shares.get("core_wait_share", 0.0)

    def users_at(self, time: float) -> str:
        """Return the text of users; empty if it is old, or if the rank waited less then."""
        is_new = time - self.users_time <= MAX_USERS_AGE_S
        waits = self.looks[-1].get("core_wait_share", 0.0)
        return self.users if is_new and self.users_share >= waits - MIN_EXCESS else ""


# The cores by job and rank.
Cores = dict[JobId, dict[int, RankCores]]


def observe(cores: Cores, seen: RankEvent, ranks: RankDevices) -> None:
    """Add an event ``process`` of a live rank."""
    if seen.event == "process" and ranks.find(seen.job_id, seen.rank):
        cores.setdefault(seen.job_id, {}).setdefault(seen.rank, RankCores()).add(seen)


def forget(cores: Cores, job: JobId, rank: int | None = None) -> None:
    """Forget a rank that ended, or all of the job."""
    if rank is None:
        cores.pop(job, None)
    else:
        cores.get(job, {}).pop(rank, None)


def evidence(cores: Cores, kind: str, found: Detected) -> Evidence:
    """Return the evidence for a finding; NONE for other kinds, or if no share is high."""
    job = found.job_id
    if kind not in KINDS or job is None:
        return NONE
    ranks = {n: r for n, r in cores.get(job, {}).items() if found.time - r.time <= MAX_AGE_S}
    for name in SHARES:
        shares = {n: s for n, rank in ranks.items() if (s := rank.share(name)) is not None}
        wanted = shares.keys() if found.rank is None else shares.keys() & {found.rank}
        excess = {n: shares[n] - _reference(kind, n, name, shares, ranks) for n in wanted}
        worst = max(excess, key=lambda n: excess[n], default=None)
        if worst is not None and excess[worst] >= MIN_EXCESS:
            against = "its peers" if kind == "straggler" and len(shares) > 1 else "usually"
            compared = f"({against} {100 * max(0.0, shares[worst] - excess[worst]):.0f} %)"
            return _evidence(name, worst, ranks[worst], shares[worst], compared, found.time)
    return NONE


def _reference(
    kind: str, rank: int, name: str, shares: Mapping[int, float], ranks: Mapping[int, RankCores]
) -> float:
    """Return the median share of the peers of a straggler, else the rank's usual share."""
    peers = [share for number, share in shares.items() if number != rank]
    return median(peers) if kind == "straggler" and peers else ranks[rank].usual[name]


def _evidence(
    name: str, number: int, rank: RankCores, share: float, compared: str, time: float
) -> Evidence:
    if name == "throttled_share":
        limit = "" if rank.limit is None else f" of {rank.limit:g} cores"
        text = f"rank {number} reached its CPU limit{limit} in {100 * share:.0f} % of the periods"
        return Evidence(2.0 + share, f"{text} {compared}")
    if name == "steal_share":
        text = f"the hypervisor kept the cores of rank {number} for {100 * share:.0f} % of the time"
        return Evidence(1.0 + share, f"{text} {compared}")
    text = f"rank {number} waited {100 * share:.0f} % of the time for a core {compared}"
    users = rank.users_at(time)
    return Evidence(1.0 + share, f"{text}, while {users}") if users else Evidence(share, text)


# --- the users of cores ---


def users_text(users: list[Any]) -> str:
    """Return ``python (pid 17, 18) used 80 % of core 5, rank 0 (pid 9) used 1.2 cores``.

    Processes of one name and core are joined; invalid entries are left out.
    """
    alike: dict[tuple[str, int | None], list[tuple[int, float]]] = {}
    for user in users[:MAX_USERS]:
        if not isinstance(user, Mapping):
            continue
        pid, used, core = (user.get(name) for name in ("pid", "cores", "core"))
        if isinstance(pid, int) and isinstance(used, int | float) and 0 <= used <= MAX_CORES:
            where = core if isinstance(core, int) else None
            alike.setdefault((_name(user), where), []).append((pid, used))
    return ", ".join(_used(name, core, uses) for (name, core), uses in alike.items())


def _used(name: str, core: int | None, uses: list[tuple[int, float]]) -> str:
    cores = sum(used for _, used in uses)
    where = "a core" if core is None else f"core {core}"
    part = f"{cores:.1f} cores" if cores >= 1.05 else f"{100 * cores:.0f} % of {where}"
    return f"{name} (pid {', '.join(str(pid) for pid, _ in uses)}) used {part}"


def _name(user: Mapping[str, Any]) -> str:
    """Return the printable part of the name that a process gave itself, or its rank."""
    rank, name = user.get("rank"), user.get("name")
    if not isinstance(name, str):
        return f"rank {rank}" if isinstance(rank, int) else "another owner's process"
    shown = "".join(char if char.isprintable() else "?" for char in name[:MAX_NAME])
    cleaned = shown.strip() or "a process"
    return f"{cleaned} of rank {rank}" if isinstance(rank, int) else cleaned
