"""Follows every ring of the rendezvous and publishes what happened.

Rings lie in the shared folder, and in the folders of pods that mount only their own.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

from warpwatch.protocol import ProtocolError
from warpwatch_daemon.ranks.counts import Positions, SavedRank
from warpwatch_daemon.ranks.folder import RendezvousFolder, RingFolder
from warpwatch_daemon.ranks.pods import KnownPods, Pods
from warpwatch_daemon.ranks.quotas import RecordBudget
from warpwatch_daemon.ranks.rank import Rank, boot_id
from warpwatch_daemon.ranks.rank_processes import RankProcesses
from warpwatch_daemon.ranks.table import (
    LIMITS,
    MAX_RINGS_PER_OWNER,
    SCAN_INTERVAL_S,
    Limits,
    OpenRing,
    RingCount,
    RingTable,
)
from warpwatch_runtime.directory import Directory
from warpwatch_telemetry.jobs import JobId, run_mark
from warpwatch_telemetry.records import End, RankSeen, Record
from warpwatch_telemetry.state import RankState

logger = logging.getLogger(__name__)

# The ring of an ended rank is kept for this time.
RING_AFTER_END_S = 600.0


class EndedRanks:
    """Removes ended ranks from ``ranks``, and their rings, in the thread that polls.

    ``forget`` removes a ring and its files. ``at`` is monotonic.
    """

    def __init__(
        self,
        ranks: list[Rank],
        count: RingCount,
        positions: Positions,
        forget: Callable[[OpenRing], None],
    ) -> None:
        self._ranks = ranks
        self._count = count
        self._positions = positions
        self._forget = forget
        # Rings of dead processes whose rank continued in another: since when, and the number of the
        # save with which its counts are on disk, if it is to be removed then.
        self.left: dict[OpenRing, tuple[float, int | None]] = {}

    def leave(self, ring: OpenRing, at: float, save: int | None = None) -> None:
        """Note that the ring's rank continues in another."""
        self.left[ring] = at, save

    def drop_earlier(self, job: JobId, at: float) -> None:
        """Drop ended ranks of an earlier run whose series now belong to this one."""
        for rank in list(self._ranks):
            same = (rank.job.owner, rank.job.name) == (job.owner, job.name)
            # Replicas of a server have series of their own.
            if same and not rank.serves and rank.job.run != job.run and not rank.live:
                self._ranks.remove(rank)
                if rank.has_ring:
                    self.leave(rank.ring, at)

    def expire(self, at: float) -> None:
        for rank in list(self._ranks):
            if not rank.live and rank.has_ring and self._count.is_short(rank.ring.budget):
                # Another ring needs the place; the counts of the newest such ranks stay.
                self._forget(rank.ring)
                rank.has_ring = False
            if rank.ended_at is not None and at - rank.ended_at >= RING_AFTER_END_S:
                if rank.has_ring:
                    self._forget(rank.ring)
                self._ranks.remove(rank)
        self._drop_ringless()
        for ring, (since, save) in list(self.left.items()):
            is_short = save is None and self._count.is_short(ring.budget)
            is_saved = save is not None and save <= self._positions.written
            if is_short or is_saved or at - since >= RING_AFTER_END_S:
                del self.left[ring]
                self._forget(ring)

    def _drop_ringless(self) -> None:
        ringless: dict[str, list[Rank]] = defaultdict(list)
        for rank in self._ranks:
            if not (rank.live or rank.has_ring):
                ringless[rank.job.owner].append(rank)
        for ranks in ringless.values():
            for rank in ranks[:-MAX_RINGS_PER_OWNER]:
                self._ranks.remove(rank)


# Without a run id, a rank that began this long after the first is of another run.
JOIN_S = 600.0


def find_rank(
    ring: OpenRing, ranks: Sequence[Rank], saved: SavedRank | None
) -> tuple[JobId, Rank | None]:
    """Return the job of a ring, and the ended rank of it that the ring continues.

    saved: the ring's rank before a restart of the daemon, which stays the same.
    Raises ProtocolError("duplicate_rank") if another live process is that rank of that run.
    """
    if saved is not None and saved.run:
        job = saved.job_id
        return job, _continued([rank for rank in ranks if rank.job == job], ring)
    runs: dict[JobId, list[Rank]] = {}
    for rank in ranks:
        if rank.job.owner == ring.owner and rank.claimed_job == ring.claims.job:
            runs.setdefault(rank.job, []).append(rank)
    for job, members in runs.items():
        is_named = job.run == ring.claims.run and not _is_alone(members, ring)
        if is_named or (not ring.claims.run and _may_join(members, ring)):
            return job, _continued(members, ring)
    return _new(ring, ranks), None


def _continued(members: Sequence[Rank], ring: OpenRing) -> Rank | None:
    rank = next((one for one in members if one.rank == ring.claims.rank), None)
    if rank is not None and rank.live:
        what = f"rank {rank.rank} of {rank.job.name} has another live process"
        raise ProtocolError("duplicate_rank", what)
    return rank


def _is_alone(members: Sequence[Rank], ring: OpenRing) -> bool:
    """Return whether it is one of several programs of a Slurm allocation, each without peers."""
    if ring.claims.kind == "serve":
        return False
    return ring.claims.world_size == 1 and any(rank.live for rank in members)


def _may_join(members: Sequence[Rank], ring: OpenRing) -> bool:
    """Return whether a ring that names no run belongs to the run of these ranks.

    A dead rank may have a successor at any time; a run whose ranks all exited is over.
    """
    said = ring.claims
    first = min(rank.first_time for rank in members)
    same = [rank for rank in members if rank.rank == said.rank]
    return (
        all(not rank.claims.run for rank in members)
        and all(rank.claims.world_size == said.world_size for rank in members)
        and all(rank.claims.master == said.master for rank in members)
        and any(rank.status != "exited" for rank in members)
        and not any(rank.live for rank in same)
        and (bool(same) or abs(ring.created_time - first) <= JOIN_S)
    )


def _replica(pod: str, run: str) -> str:
    """Return the short name of a server's replica: its pod's, else six digits of its run.

    A pod may have several independent engines; the shim ends the run of each with its number.
    """
    engine = re.match(r".*(-dp\d+)", run)
    return f"{pod}{engine[1] if engine else ''}" if pod else run_mark(run)[1:]


def _new(ring: OpenRing, ranks: Iterable[Rank]) -> JobId:
    own = [rank for rank in ranks if rank.job.owner == ring.owner]
    mark = ring.name.removesuffix(".ring")[-6:]
    run = ring.claims.run
    if not run:
        run = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(ring.created_time))}-{mark}"
    elif any(rank.job.run == run and rank.claimed_job == ring.claims.job for rank in own):
        run = f"{run}-{mark}"
    name = ring.claims.job
    # Live replicas of a server have one name.
    serves = ring.claims.kind == "serve"
    taken = {rank.job.name for rank in own if rank.live and not (serves and rank.serves)}
    if name in taken:
        name += run_mark(run)
    if name in taken:
        name = f"{name}-{mark}"
    return JobId(ring.owner, name, run)


# The series of an ended rank are kept for this time.
SERIES_AFTER_END_S = 300.0
SAVE_INTERVAL_S = 1.0
# Records of failed polls are kept up to this number: 1,024 rings at two steps per second for ten
# seconds are 20,480.
MAX_UNSENT = 20_000
# More rings than there may be.
MAX_ENDED = 2048
# The claims that a shim may learn after its first steps, and with which a rank is seen again.
_SEEN_AGAIN = attrgetter("device", "parallel", "role")
# A scrape waits this long for a running poll, which usually takes milliseconds.
STATES_WAIT_S = 0.25


class RanksSource:
    """The ranks of all rings. ``poll`` is the pipeline's and touches no disk.

    Other methods may be called from any thread. ``now`` is wall clock and dates events, ``at`` is
    monotonic and measures durations, ``monotonic`` measures the poll itself.
    """

    def __init__(
        self,
        folder: RendezvousFolder,
        positions: Positions,
        stopped_after_s: float,
        reject: Callable[[str], None],
        scan_interval_s: float = SCAN_INTERVAL_S,
        limits: Limits = LIMITS,
        known_pods: KnownPods | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._stopped_after_s = stopped_after_s
        self.reject = reject
        self._count = RingCount(limits.rings)
        table = RingTable(Directory(folder.ranks), reject, scan_interval_s, self._count)
        remedy = f"start the training with WARPWATCH_INBOX={folder.inbox}"
        self._shared = RingFolder(Directory(folder.path), Directory(folder.inbox), table, remedy)
        self._known_pods = known_pods
        self._pods = Pods(
            folder, self._count, reject, scan_interval_s, limits, known_pods, monotonic
        )
        self._positions = positions
        self._saved = positions.load()
        # Whether all rings from before the start have their saved counts.
        self._claimed = False
        self._saved_at = 0.0
        self._rank_was_saved = True
        self._processes = RankProcesses()
        self._budget = RecordBudget(reject)
        self._boot_id = boot_id()
        self._lock = threading.Lock()
        self._ranks: list[Rank] = []
        self._states: tuple[RankState, ...] = ()
        self._dead = EndedRanks(self._ranks, self._count, positions, self._forget)
        # Rings of processes that ended since the last ``take_ended``.
        self._ended: deque[tuple[OpenRing, RingFolder]] = deque(maxlen=MAX_ENDED)
        self._unsent: list[Record] = []
        self._shared.sweep_commands()

    # --- the pipeline's side ---

    def poll(self, now: float, at: float) -> list[Record]:
        """Return everything since the last call, in order of time.

        Raises OSError if the rendezvous cannot be read; the next call returns what this one read.
        """
        with self._lock:
            records = self._unsent
            del records[:-MAX_UNSENT]
            # Living ranks come first, so that a successor finds the dead one before it.
            live = [rank for rank in self._ranks if rank.live]
            limits = self._budget.share([rank.ring for rank in live], at)
            for rank in live:
                records.extend(self._update(rank, now, at, limits[rank.ring]))
            records.extend(self._adopt(now, at))
            records.extend(self._processes.poll(self._ranks, now, at))
            self._dead.expire(at)
            if at - self._saved_at >= SAVE_INTERVAL_S:
                self._saved_at = at
                # Save once more after the last rank is removed.
                if self._ranks or self._rank_was_saved:
                    self._save()
                self._rank_was_saved = bool(self._ranks)
            self._unsent = []
        records.sort(key=lambda record: record.time)
        return records

    def close(self) -> None:
        with self._lock:
            self._save()
            self._pods.close()

    # --- the hub's side ---

    def states(self, at: float) -> tuple[RankState, ...]:
        """Return every shown rank as it is now.

        While a poll hangs in a rendezvous on a dead disk, return the last states for the scrape.
        """
        if self._lock.acquire(timeout=STATES_WAIT_S):
            try:
                self._states = tuple(rank.state() for rank in self._shown(at))
            finally:
                self._lock.release()
        return self._states

    def devices(self, at: float) -> dict[tuple[JobId, int], str | None]:
        """Return the device of each shown rank; None for an ended one."""
        with self._lock:
            return {
                (rank.job, rank.rank): rank.claims.device if rank.live else None
                for rank in self._shown(at)
            }

    def served_pods(self) -> tuple[str, ...]:
        """Return the UIDs of the pods whose own folders are scanned for rings."""
        with self._lock:
            return self._pods.served

    def idle_pods(self) -> frozenset[str]:
        with self._lock:
            return self._pods.idle - set(self._pods.served)

    # --- the captures' side ---

    def take_ended(self) -> list[tuple[OpenRing, RingFolder]]:
        """Return the rings of processes that ended since the last call, with their folders."""
        with self._lock:
            ended = list(self._ended)
            self._ended.clear()
        return ended

    def live(self) -> list[Rank]:
        with self._lock:
            return [rank for rank in self._ranks if rank.live]

    def targets(self, job: JobId) -> dict[int, Rank]:
        """Return the live ranks of a job by number."""
        with self._lock:
            return {rank.rank: rank for rank in self._ranks if rank.live and rank.job == job}

    def open_ring(self, rank: Rank) -> tuple[OpenRing, RingFolder] | None:
        """Return the ring of a live rank and its folder; None if the rank has just ended."""
        with self._lock:
            return (rank.ring, self._folder_of(rank.ring)) if rank.live else None

    def step_begun(self, rank: Rank) -> int | None:
        """Return the step that the rank has begun, read from its ring now."""
        with self._lock:
            return rank.ring.reader.step_begun() if rank.live else None

    # --- inside ---

    def _shown(self, at: float) -> Iterator[Rank]:
        for rank in self._ranks:
            if rank.ended_at is None or at - rank.ended_at < SERIES_AFTER_END_S:
                yield rank

    def _adopt(self, now: float, at: float) -> Iterator[Record]:
        rings = [*self._shared.table.scan(now, at), *self._pods.scan(now, at)]
        for ring in sorted(rings, key=lambda ring: ring.created_time):
            folder = self._folder_of(ring)
            if self._was_left(ring, at):
                continue
            try:
                folder.commands.prepare(ring.name)
            except OSError as error:
                folder.table.postpone(ring, "no_command_file", error, at)
                continue
            try:
                rank = self._rank_of(ring, now, at)
            except ProtocolError as error:
                folder.commands.remove(ring.name)
                folder.table.postpone(ring, error.reason, error, at)
                continue
            if rank.serves:
                rank.replica = _replica(self._pod(ring)[0], rank.job.run)
            # The rank is dated before its first step, whenever this daemon found it.
            yield self._seen(rank, ring, min(now, ring.created_time))
            yield from self._update(rank, now, at, self._budget.share_of_new(ring))
        self._claimed = self._pods.settled

    def _pod(self, ring: OpenRing) -> tuple[str, str]:
        """Return the pod's name and UID from the kubelet; the ring's own is only a claim."""
        pod = (self._known_pods() or {}).get(ring.pod_uid or "") if self._known_pods else None
        return ("", "") if pod is None else (pod.name, ring.pod_uid or "")

    def _seen(self, rank: Rank, ring: OpenRing, time: float) -> RankSeen:
        said = rank.claims
        pod, pod_uid = self._pod(ring)
        return RankSeen(
            time, rank=rank.rank, world_size=said.world_size, device=said.device,
            master="" if said.run else said.master, parallel=said.parallel, pod=pod,
            pod_uid=pod_uid, kind=said.kind, role=said.role, replica=rank.replica,
            **rank.job.fields(),
        )  # fmt: skip

    def _was_left(self, ring: OpenRing, at: float) -> bool:
        """Return whether its rank continued in another ring before this daemon started."""
        key = (ring.pod_uid, ring.name)
        saved = self._saved.get(key)
        if saved is None or not saved.left:
            return False
        del self._saved[key]
        self._dead.leave(ring, at)
        return True

    def _folder_of(self, ring: OpenRing) -> RingFolder:
        return self._shared if ring.pod_uid is None else self._pods.folder(ring.pod_uid)

    def _rank_of(self, ring: OpenRing, now: float, at: float) -> Rank:
        entry = self._saved.get((ring.pod_uid, ring.name))
        job, rank = find_rank(ring, self._ranks, entry)
        self._saved.pop((ring.pod_uid, ring.name), None)
        self._dead.drop_earlier(job, at)
        before = rank.ring if rank is not None and rank.has_ring else None
        if rank is None:
            phases = (peer.phase_names.of_job for peer in self._ranks if peer.job == job)
            rank = Rank(job, ring, now, at, next(phases, set()))
            self._ranks.append(rank)
        else:
            rank.adopt(ring, at)
        if entry is not None:
            try:
                rank.restore(entry)
            except ValueError as error:
                logger.warning("saved counts of %s are unusable: %s", ring.name, error)
        if before is not None:
            self._dead.leave(before, at)
            # Files of another pod stay as if the rank was not continued.
            if before.pod_uid == ring.pod_uid:
                self._dead.leave(before, at, self._save())
        return rank

    def _update(self, rank: Rank, now: float, at: float, limit: int) -> Iterator[Record]:
        before = _SEEN_AGAIN(rank.claims)
        try:
            yield from rank.update(now, at, limit, self._stopped_after_s, self._boot_id)
            if _SEEN_AGAIN(rank.claims) != before:
                yield self._seen(rank, rank.ring, now)
            if rank.gone_since is not None:
                peers = (peer for peer in self._ranks if peer.job == rank.job)
                yield from rank.settle(any(peer.shuts_down for peer in peers), now, at)
            if not rank.live:
                self._ended.append((rank.ring, self._folder_of(rank.ring)))
        except ProtocolError as error:
            # The fate of the process is unknown, so nothing is expected of it any more.
            yield End(now, rank=rank.rank, **rank.job.fields())
            folder = self._folder_of(rank.ring)
            folder.table.refuse(rank.ring, error)
            folder.commands.remove(rank.ring.name)
            # Its reader is closed: nobody reads it from now on.
            rank.ended_at = at
            self._ranks.remove(rank)
        for _ in range(rank.take_refused()):
            self.reject("bad_event")

    def _forget(self, ring: OpenRing) -> None:
        folder = self._folder_of(ring)
        folder.table.forget(ring, remove=True)
        folder.commands.remove(ring.name)

    def _save(self) -> int:
        """Save all ranks, and return the number of this save."""
        ranks = (rank.save() for rank in self._ranks if rank.has_ring)
        left = (SavedRank(pod=ring.pod_uid, ring=ring.name, left=True) for ring in self._dead.left)
        unclaimed = () if self._claimed else self._saved.values()
        return self._positions.put((*ranks, *left, *unclaimed))
