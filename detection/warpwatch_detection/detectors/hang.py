"""Detects a job without a step for longer than its usual pauses, or with a sign of a hang.

Signs are a process that does not respond, and processes and devices that are all idle. If backward
passes continue, the job does not hang: its steps may end where there is no hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from warpwatch_detection.config import HangConfig
from warpwatch_detection.detector import (
    NEVER,
    Cleared,
    Detector,
    DetectorStatus,
    Nearest,
    Observation,
    Results,
    changed,
    job_found,
    job_status,
)
from warpwatch_detection.detectors.serving.stalls import (
    CRASH_QUIET_S,
    GAP_FACTOR,
    HOLDS_GIL,
    ServerProgress,
)
from warpwatch_detection.detectors.step_progress import (
    DeviceActivity,
    Idle,
    JobProgress,
    RankProgress,
    idle_rank,
    idle_since,
    read_device,
    read_process,
)
from warpwatch_detection.job_steps import CaptureWindows
from warpwatch_detection.ranks import RankDevices
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import DeviceReading, End, RankEvent, Serve, Step

# If steps are slow, this many typical steps are the timeout.
TIMEOUT_STEPS = 28.0
# Processes and devices must be idle for this time; as they are read every 2 s, a hang is found
# within 30 s.
IDLE_S = 20.0
# Once a job has been silent for longer than its least limit, it is checked this often.
CHECK_S = 1.0


@dataclass(slots=True)
class HangState:
    """The jobs and servers, and the devices that ranks use."""

    jobs: dict[JobId, JobProgress] = field(default_factory=dict)
    devices: dict[str, DeviceActivity] = field(default_factory=dict)
    captures: CaptureWindows = field(default_factory=CaptureWindows)
    servers: dict[JobId, ServerProgress] = field(default_factory=dict)
    deadline: float = NEVER


class Hang(Detector):
    """Finds one fault per job, and names the rank if the culprit is known."""

    kind = "hang"
    waits = True
    reads = (Step, Serve, RankEvent, DeviceReading, End)

    def __init__(self, config: HangConfig, ranks: RankDevices) -> None:
        self._config = config
        self._ranks = ranks
        self.state = HangState()

    @property
    def state(self) -> HangState:
        return self._state

    @state.setter
    def state(self, state: HangState) -> None:
        """Set a saved state, and compute its deadlines again."""
        self._state, self._jobs = state, state.jobs
        for name, job in state.jobs.items():
            if job.check_time < NEVER and job.ranks:
                job.check_time = self._check_time(name, job, job.newest_time)
        self._schedule()

    def observe(self, seen: Observation) -> Results:
        if isinstance(seen, Serve) or (isinstance(seen, Step) and seen.work_class):
            return self._server(seen)
        if isinstance(seen, Step):
            return self._step(seen)
        if isinstance(seen, RankEvent | End) and seen.job_id in self.state.servers:
            return self._server(seen)
        if isinstance(seen, RankEvent):
            return self._event(seen)
        if isinstance(seen, End):
            return self._gone(seen)
        if isinstance(seen, DeviceReading):
            known = self.state.devices.get(seen.device)
            if known is not None or any(self._ranks.on(seen.device)):
                self.state.devices[seen.device] = read_device(known, seen)
        return ()

    def expire(self, now: float) -> Results:
        due = [(name, job) for name, job in self._jobs.items() if job.check_time <= now]
        hung = [self._hang(*one, now) for one in due if self._due(*one, now) <= now]
        for name, job in due:
            job.check_time = self._check_time(name, job, now)
        hung += self._hung_servers(now)
        self._schedule()
        return hung

    def forget(self, job: JobId) -> None:
        self._jobs.pop(job, None)
        self.state.servers.pop(job, None)
        self.state.captures.forget(job)
        for device in [one for one in self.state.devices if not any(self._ranks.on(one))]:
            del self.state.devices[device]
        self._schedule()

    # --- servers ---

    def _server(self, seen: Serve | Step | RankEvent | End) -> Results:
        name = seen.job_id
        server = self.state.servers.setdefault(name, ServerProgress())
        if isinstance(seen, RankEvent) and self.state.captures.observe(seen):
            server.excuse(seen.time)
        over = server.observe(seen)
        # Iterations only put the deadline off, so it is computed again once per second.
        if over or not isinstance(seen, Step):
            self._schedule()
        return changed(name, seen.time, over, None)

    def _hung_servers(self, now: float) -> list[Detected]:
        found = []
        for name, server in self.state.servers.items():
            if server.due > now:
                continue
            captured = self.state.captures.runs_until(name, now)
            if captured is not None:
                server.excuse(captured)
                continue
            server.hung = True
            silent_s, text = now - server.progress_time, server.sentence(now)
            usual_s, rank = server.longest_gap_s, server.culprit
            found.append(job_found(name, now, text, silent_s, usual_s, rank=rank))
        return found

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, server in self.state.servers.items():
            text = f"{server.in_flight} requests in flight, longest pause "
            yield job_status(name, server.hung, f"{text}{server.longest_gap_s:.3g} s")
        for name, job in self._jobs.items():
            if not job.ranks:
                continue
            limit_s, step_s = self._limit_s(job), median(job.times.recent_s)
            text = (
                f"{len(job.ranks)} ranks step every {step_s:.3g} s, longest pause "
                f"{job.longest_gap_s:.3g} s, limit {limit_s:.0f} s"
            )
            value, near = job.newest_time - job.last_time, Nearest(job.longest_gap_s / limit_s)
            yield job_status(name, job.hung, text, value, limit_s, near, baseline=step_s)

    # --- records ---

    def _step(self, seen: Step) -> Results:
        name, now = seen.job_id, seen.time
        job = self._jobs.get(name) or self._jobs.setdefault(name, JobProgress())
        rank = job.ranks.get(seen.rank)
        is_new = rank is None
        if rank is None:
            rank = job.ranks[seen.rank] = RankProgress(now, seen.step)
        else:
            is_usual = seen.step == rank.step + 1 and 0 <= now - rank.time <= job.longest_gap_s
            if not is_usual or job.episode is not None:
                # A pause for a crash or for a capture is excused.
                captures = self.state.captures.runs_until(name, now) is not None
                job.add_step(seen, rank, is_excused=captures or rank.time < job.quiet_until)
            rank.time, rank.step = now, seen.step
        job.times.add(seen.duration_s)
        if is_new:
            self._recheck(name, job, now)
        if job.episode is None and rank.silent_since is None:
            return ()
        return self._over(name, job, now) if job.resume(seen.rank) else ()

    def _event(self, seen: RankEvent) -> Results:
        ended = self.state.captures.observe(seen)
        job = self._jobs.get(seen.job_id)
        if job is None:
            return ()
        rank = job.ranks.get(seen.rank)
        if ended:
            job.quiet_until = max(job.quiet_until, seen.time)
            if rank is not None:
                rank.silent_since, rank.holds_gil = None, False
            self._recheck(seen.job_id, job, seen.time)
        if seen.event in ("died", "exception"):
            job.quiet_until = seen.time + CRASH_QUIET_S
        if seen.event in ("died", "finished"):
            return self._gone(seen)
        if seen.event == "process":
            process = read_process(job.processes.pop(seen.rank, None), seen)
            if process is not None:
                job.processes[seen.rank] = process
            return self._process(seen.job_id, job, seen.time)
        if seen.event == "stopped" and rank is not None:
            return self._stopped(seen, job, rank)
        if seen.event in ("training", "resumed") and rank is not None:
            return self._goes_on(seen, job, rank)
        return ()

    def _goes_on(self, seen: RankEvent, job: JobProgress, rank: RankProgress) -> Results:
        if seen.event == "training":
            rank.time = max(rank.time, seen.time)
        elif rank.silent_since is None:
            return ()
        else:
            # All of its peers have waited for it, so their time starts again.
            for peer in job.ranks.values():
                peer.time = seen.time
        return self._over(seen.job_id, job, seen.time) if job.resume(seen.rank) else ()

    def _stopped(self, seen: RankEvent, job: JobProgress, rank: RankProgress) -> Results:
        rank.silent_since = seen.time
        rank.holds_gil = seen.detail.get("silent_reason") == HOLDS_GIL
        if job.hung:
            # The hang was found before; now the culprit is known.
            return (self._hang(seen.job_id, job, seen.time),)
        self._recheck(seen.job_id, job, seen.time)
        return ()

    def _gone(self, seen: End | RankEvent) -> Results:
        job = self._jobs.get(seen.job_id)
        if job is None or seen.rank is None or not job.forget(seen.rank):
            return ()
        return self._over(seen.job_id, job, seen.time)

    def _over(self, name: JobId, job: JobProgress, now: float) -> Results:
        self._recheck(name, job, now)
        return (Cleared(now, name),)

    # --- deadlines ---

    def _recheck(self, name: JobId, job: JobProgress, now: float) -> None:
        job.check_time = self._check_time(name, job, now)
        self._schedule()

    def _check_time(self, name: JobId, job: JobProgress, now: float) -> float:
        """Return when to check the job next.

        Steps only defer its deadline. But once it has been silent for longer than the least limit,
        the steps of a quick rank may lower its limit.
        """
        due = self._due(name, job, now)
        if job.hung or not job.ranks:
            return due
        return min(due, max(job.quiet_since + self._least_limit_s(job), now + CHECK_S))

    def _schedule(self) -> None:
        jobs = (job.check_time for job in self._jobs.values())
        servers = (server.due for server in self.state.servers.values())
        self.state.deadline = min(min(jobs, default=NEVER), min(servers, default=NEVER))

    def _least_limit_s(self, job: JobProgress) -> float:
        """Return the least limit of a job without its slow steps; it never falls."""
        return max(self._config.timeout_s, GAP_FACTOR * job.longest_gap_s)

    def _limit_s(self, job: JobProgress) -> float:
        limit_s = self._least_limit_s(job)
        recent_s = job.times.recent_s
        # The median is needed only if the longest step would raise the limit.
        if TIMEOUT_STEPS * max(recent_s, default=0.0) > limit_s:
            limit_s = max(limit_s, TIMEOUT_STEPS * median(recent_s))
        return max(limit_s, self._config.warmup_timeout_s) if job.warms_up else limit_s

    def _due(self, name: JobId, job: JobProgress, now: float) -> float:
        """Return when the job counts as hung if no more records arrive."""
        if job.hung or not job.ranks:
            return NEVER
        due = job.quiet_since + self._limit_s(job)
        if unresponsive := [s for r in job.ranks.values() if (s := r.unresponsive_since)]:
            due = min(due, max(unresponsive))
        return max(due, self.state.captures.runs_until(name, now) or due)

    def _process(self, name: JobId, job: JobProgress, now: float) -> Results:
        """Check after a reading of processes and devices whether the whole job is idle."""
        if job.hung or not job.ranks or job.warms_up or now < job.quiet_until:
            return ()
        since = self._idle_since(name, job, now)
        if since is None or self.state.captures.runs_until(name, now) is not None:
            return ()
        since = max(since, job.newest_time)
        least_s = max(IDLE_S, GAP_FACTOR * job.longest_idle_s, median(job.times.recent_s))
        if now - since < least_s:
            return ()
        found = self._hang(name, job, now)
        if job.episode is not None:
            job.episode.is_idle = True
        self._recheck(name, job, now)
        return (found,)

    def _idle(self, name: JobId, job: JobProgress, now: float) -> dict[int, Idle | None]:
        """Return since when each rank is idle."""
        found = {}
        for number in job.ranks:
            uuid = self._ranks.device(name, number)
            # A device that was never read is not idle.
            device = None if uuid is None else self.state.devices.get(uuid, DeviceActivity())
            found[number] = idle_since(job.processes.get(number), device, now)
        return found

    def _idle_since(self, name: JobId, job: JobProgress, now: float) -> float | None:
        """Return when the job, or a rank that holds the GIL, became idle; None if unknown."""
        ranks = self._idle(name, job, now)
        known = {number: idle for number, idle in ranks.items() if idle is not None}
        holding = [idle for number, (idle, _) in known.items() if job.ranks[number].holds_gil]
        if holding:
            return min(holding)
        if len(known) < max(len(ranks), self._ranks.world_size(name)):
            return None
        return max(map(min, known.values()))

    # --- results ---

    def _hang(self, name: JobId, job: JobProgress, now: float) -> Detected:
        culprit = job.culprit()
        if culprit is None and not job.silent:
            culprit = idle_rank(self._idle(name, job, now), now)
        idle_s, step_s = now - job.last_time, median(job.times.recent_s)
        job.hang(culprit, self._limit_s(job), now)
        begin = step = max(rank.step for rank in job.ranks.values())
        text = "no rank has finished a step"
        if culprit is not None:
            begin, text = job.ranks[culprit].step, f"rank {culprit} has finished no step"
        text += f" for {idle_s:.0f} s (a step takes {step_s:.3g} s)"
        since = self._idle_since(name, job, now)
        if culprit in job.silent:
            text += ", its process does not respond"
        elif since is not None and now - since >= IDLE_S:
            text += f", nothing of the job has moved for {now - since:.0f} s"
        return job_found(name, now, text, idle_s, step_s, rank=culprit, step=step, begin_step=begin)
