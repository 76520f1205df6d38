"""No step for longer than anything the job has shown, or a sign that none will come.

Such activity are a process that does not respond, and processes and devices of which nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from warpwatch_detection.capture_windows import CaptureWindows
from warpwatch_detection.config_life import HangConfig
from warpwatch_detection.detector import NEVER, Detector, DetectorStatus, Fine, Observation, Verdict
from warpwatch_detection.detectors.idleness import DeviceActivity, read_device
from warpwatch_detection.detectors.step_progress import RECENT_STEPS, JobProgress
from warpwatch_detection.signals.medians import median
from warpwatch_telemetry.anomalies import Found
from warpwatch_telemetry.captures import CAPTURE_TIMEOUT_S
from warpwatch_telemetry.records import DeviceReading, End, RankEvent, RankSeen, Step

# Survivors that wait for a dead rank have the crash's cause, not one of their own.
CRASH_QUIET_S = 600.0
# Of the reasons of a silence the one that a long call in C has too: that may be a checkpoint.
HOLDS_GIL = "holds the GIL"


@dataclass(slots=True)
class HangState:
    """captures: job -> rank -> begin of its capture."""

    jobs: dict[str, JobProgress] = field(default_factory=dict)
    devices: dict[str, DeviceActivity] = field(default_factory=dict)
    captures: dict[str, dict[int, float]] = field(default_factory=dict)
    deadline: float = NEVER


class Hang(Detector):
    """One anomaly a job, named after a rank only where it is known whose fault it is."""

    kind = "hang"
    reads = (Step, RankSeen, RankEvent, DeviceReading, End)

    def __init__(self, config: HangConfig) -> None:
        self._config = config
        self.state = HangState()

    @property
    def state(self) -> HangState:
        return self._state

    @state.setter
    def state(self, state: HangState) -> None:
        """Of one that was saved it must be known how much time was left."""
        self._state, self._jobs = state, state.jobs
        for name, job in state.jobs.items():
            if job.check_time < NEVER and job.last:
                job.check_time = self._due(name, job, max(job.last.values()))
                job.lenient = True
        self._schedule()

    def observe(self, seen: Observation) -> Iterable[Verdict]:
        if isinstance(seen, Step):
            return self._step(seen)
        elif isinstance(seen, DeviceReading):
            self._device(seen)
        elif isinstance(seen, RankEvent):
            return self._event(seen)
        elif isinstance(seen, RankSeen):
            self._rank_seen(seen)
        elif isinstance(seen, End) and seen.rank is not None:
            return self._gone(seen.job, seen.rank, seen.time)
        return ()

    def expire(self, now: float) -> Iterable[Verdict]:
        verdicts: list[Verdict] = []
        for name, job in self._jobs.items():
            if job.check_time <= now:
                if self._due(name, job, now) <= now:
                    verdicts.append(self._hang(name, job, now))
                job.check_time = self._check_time(name, job, now)
        self._schedule()
        return verdicts

    def forget(self, job: str) -> None:
        self._jobs.pop(job, None)
        self._captures.forget(job)
        used = {d for other in self._jobs.values() for d in other.activity.devices.values()}
        for device in self.state.devices.keys() - used:
            del self.state.devices[device]
        self._schedule()

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self._jobs.items():
            if not job.last:
                continue
            limit_s = self._limit_s(job)
            idle_s = max(job.last.values()) - min(job.last.values())
            text = (
                f"{len(job.last)} ranks step every {median(job.recent_s):.3g} s; without a step "
                f"for {limit_s:.0f} s it hangs; the longest pause was {job.longest_gap_s:.3g} s"
            )
            yield DetectorStatus(
                "found" if job.hung else "fine",
                text,
                job=name,
                value=idle_s,
                baseline=median(job.recent_s),
                limit=limit_s,
                nearest=job.longest_gap_s / limit_s,
            )

    # --- what is seen ---

    @property
    def _captures(self) -> CaptureWindows:
        return CaptureWindows(CAPTURE_TIMEOUT_S, self.state.captures)

    def _capture_end(self, job: str, now: float) -> float | None:
        """When the job's captures are given up at the latest; most often there is none."""
        return self._captures.runs_until(job, now) if self.state.captures else None

    def _job(self, name: str) -> JobProgress:
        job = self._jobs.get(name)
        if job is None:
            job = self._jobs[name] = JobProgress()
        return job

    def _rank_seen(self, seen: RankSeen) -> None:
        activity = self._job(seen.job).activity
        activity.gone(seen.rank)
        activity.world_size = seen.world_size
        if seen.device is not None:
            activity.devices[seen.rank] = seen.device

    def _device(self, seen: DeviceReading) -> None:
        known = self.state.devices.get(seen.device)
        if known is None and not any(
            seen.device in job.activity.devices.values() for job in self._jobs.values()
        ):
            return
        self.state.devices[seen.device] = read_device(known, seen, self._config)

    def _step(self, seen: Step) -> Iterable[Verdict]:
        job, rank, now = self._job(seen.job), seen.rank, seen.time
        last = job.last.get(rank)
        if last is not None and (
            seen.step != job.step[rank] + 1
            or not 0.0 <= now - last <= job.longest_gap_s
            or job.paused
            or job.rested
        ):
            self._go_on(seen, job, last)
        job.add(seen)
        if not (last is None or job.lenient or job.hung or job.stopped):
            return ()
        if last is None or job.lenient:
            self._recheck(seen.job, job, now)
        return self._resumed(seen.job, job, rank, now) if job.hung or job.stopped else ()

    def _go_on(self, seen: Step, job: JobProgress, last: float) -> None:
        """A step after a pause, or in another order."""
        rank, now, step = seen.rank, seen.time, job.step[seen.rank]
        if now < last:
            job.lenient = True
        if seen.step <= step - RECENT_STEPS:
            job.restart()
        # Where records are missing nobody knows how long the job paused.
        if now - last > job.longest_gap_s and seen.step == step + 1:
            self._gap(seen, job, last)
        if job.paused:
            in_order = seen.step == step + 1 and not self._is_excused(seen, job, last)
            job.go_on(rank, now, in_order)
        if job.rested:
            job.longest_rest_s = max(job.longest_rest_s, now - last)

    def _gap(self, seen: Step, job: JobProgress, last: float) -> None:
        """Stateful what pauses the job makes in health: no hang's, no crash's, no capture's."""
        if not (job.hung or seen.rank in job.paused or self._is_excused(seen, job, last)):
            job.longest_gap_s = seen.time - last

    def _is_excused(self, seen: Step, job: JobProgress, last: float) -> bool:
        capture_end = self._capture_end(seen.job, seen.time)
        return last < job.quiet_until or capture_end is not None

    def _event(self, seen: RankEvent) -> Iterable[Verdict]:
        ended = self._captures.observe(seen)
        job = self._jobs.get(seen.job)
        if job is None:
            return ()
        if ended:
            job.quiet_until = max(job.quiet_until, seen.time)
            job.stopped.pop(seen.rank, None)
            self._recheck(seen.job, job, seen.time)
        if seen.event in ("died", "exception"):
            job.quiet_until = seen.time + CRASH_QUIET_S
        if seen.event == "died":
            return self._gone(seen.job, seen.rank, seen.time)
        if seen.event == "process":
            job.activity.process(seen, self._config)
            return self._rest(seen.job, job, seen.time)
        if seen.event == "stopped":
            return self._stopped(seen, job)
        if seen.event == "resumed" and job.stopped.pop(seen.rank, None) is not None:
            # All of its peers have waited for it; they get their time again.
            job.last = dict.fromkeys(job.last, seen.time)
            return self._resumed(seen.job, job, seen.rank, seen.time)
        return ()

    def _stopped(self, seen: RankEvent, job: JobProgress) -> Iterable[Verdict]:
        job.stopped[seen.rank] = seen.time
        job.busy.discard(seen.rank)
        if seen.detail.get("silent_reason") == HOLDS_GIL:
            job.busy.add(seen.rank)
        if job.hung and job.durations_s:
            # Found by its silence alone; now it has a name.
            return (self._hang(seen.job, job, seen.time),)
        self._recheck(seen.job, job, seen.time)
        return ()

    def _gone(self, name: str, rank: int, now: float) -> Iterable[Verdict]:
        job = self._jobs.get(name)
        if job is None:
            return ()
        was_hung = bool(job.hung)
        job.remove(rank)
        if was_hung and not job.hung:
            self._recheck(name, job, now)
            return (Fine(now, name),)
        return ()

    def _resumed(self, name: str, job: JobProgress, rank: int, now: float) -> Iterable[Verdict]:
        job.stopped.pop(rank, None)
        job.busy.discard(rank)
        if rank not in job.hung:
            return ()
        job.hung.discard(rank)
        if job.hung:
            return ()
        job.rested = False
        self._recheck(name, job, now)
        return (Fine(now, name),)

    # --- when it is due ---

    def _recheck(self, name: str, job: JobProgress, now: float) -> None:
        job.check_time = self._check_time(name, job, now)
        self._schedule()

    def _check_time(self, name: str, job: JobProgress, now: float) -> float:
        """Not before this is the job due; steps meanwhile only move that back.

        Unless it has been silent for so long that nothing but a lenient limit can be waited for.
        """
        due = self._due(name, job, now)
        if job.hung or not job.last:
            return due
        soon = self._idle_since(job) + self._least_limit_s(job)
        job.lenient = soon <= now
        return due if job.lenient else min(due, soon)

    def _schedule(self) -> None:
        times = [job.check_time for job in self._jobs.values()]
        self.state.deadline = min(times, default=NEVER)

    def _least_limit_s(self, job: JobProgress) -> float:
        """Of a job that goes on as it is; it never falls."""
        return max(self._config.timeout_s, self._config.gap_factor * job.longest_gap_s)

    def _limit_s(self, job: JobProgress) -> float:
        config, limit_s = self._config, self._least_limit_s(job)
        # The typical step is none of the longest; most often that says enough.
        if config.median_steps * max(job.recent_s, default=0.0) > limit_s:
            limit_s = max(limit_s, config.median_steps * job.typical_s())
        return max(limit_s, config.warmup_timeout_s) if self._warms_up(job) else limit_s

    def _warms_up(self, job: JobProgress) -> bool:
        return job.steps <= self._config.warmup_steps * len(job.last)

    def _idle_since(self, job: JobProgress) -> float:
        return max(min(job.last.values()), job.quiet_until)

    def _due(self, name: str, job: JobProgress, now: float) -> float:
        """When the job counts as hung if nothing more comes."""
        if job.hung or not job.last:
            return NEVER
        due, capture_end = self._idle_since(job) + self._limit_s(job), self._capture_end(name, now)
        if unresponsive := job.unresponsive():
            due = min(due, max(job.stopped[rank] for rank in unresponsive))
        return due if capture_end is None else max(due, capture_end)

    def _rest(self, name: str, job: JobProgress, now: float) -> Iterable[Verdict]:
        """Processes and devices have been read: does nothing of the job move?"""
        if job.hung or not job.last or self._warms_up(job) or now < job.quiet_until:
            return ()
        since = self._rest_since(job, now)
        if since is None or self._capture_end(name, now) is not None:
            return ()
        config, since = self._config, max(since, *job.last.values())
        limit_s = max(config.rest_s, config.gap_factor * job.longest_rest_s, median(job.recent_s))
        if now - since < limit_s:
            return ()
        found = self._hang(name, job, now)
        job.rested, job.check_time = True, NEVER
        self._schedule()
        return (found,)

    def _rest_since(self, job: JobProgress, now: float) -> float | None:
        """Of the whole job, or of a rank that holds up its own heartbeat and does nothing."""
        devices = self.state.devices
        rests = [job.activity.rank_rest_since(rank, devices, now) for rank in job.busy]
        known = [rest for rest in rests if rest is not None]
        return min(known) if known else job.activity.rest_since(job.last, devices, now)

    # --- what is said ---

    def _hang(self, name: str, job: JobProgress, now: float) -> Found:
        rank = job.culprit()
        if rank is None and not job.stopped:
            rank = job.activity.idle_rank(job.last, self.state.devices, now)
        idle_s = now - min(job.last.values())
        limit_s = self._limit_s(job)
        stuck = {r for r, last in job.last.items() if last + limit_s <= now}
        job.pause()
        job.hung = ({rank} if rank is not None else stuck) & job.last.keys() or set(job.last)
        step = max(job.step.values())
        who = "no rank has finished a step" if rank is None else f"rank {rank} has finished no step"
        why = self._why(job, rank, now)
        typical = f"a step takes {median(job.recent_s):.3g} s"
        return Found(
            time=now,
            severity="critical",
            job=name,
            rank=rank,
            step=step,
            begin_step=step if rank is None else job.step.get(rank, step),
            value=idle_s,
            baseline=median(job.recent_s),
            summary=f"{who} for {idle_s:.0f} s ({typical}){why}",
        )

    def _why(self, job: JobProgress, rank: int | None, now: float) -> str:
        if rank in job.stopped:
            return ", its process does not respond"
        since = self._rest_since(job, now)
        if since is None or now - since < self._config.rest_s:
            return ""
        return f", nothing of the job has moved for {now - since:.0f} s"
