"""One rank of a job over nodes, as its node tells of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent, RankSeen, Step
from warpwatch_telemetry.state import RankState, RecentSteps, StepDurations

JobRecord = RankSeen | Step | RankEvent | End


@dataclass(slots=True)
class Member:
    """One rank of the job, on the node of this address."""

    node: str
    seen: RankSeen
    status: str = "running"
    silent_reason: str | None = None
    step: int | None = None
    last_step_time: float | None = None
    samples: int = 0
    tokens: int = 0
    steps: int = 0
    memory_allocated_bytes: int | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    durations: StepDurations = field(default_factory=StepDurations)
    recent: RecentSteps = field(default_factory=RecentSteps)

    @property
    def is_live(self) -> bool:
        return self.status in ("running", "stopped")

    def take(self, record: JobRecord) -> None:
        if isinstance(record, Step):
            self._take_step(record)
        elif isinstance(record, End):
            self.status = "exited"
        elif isinstance(record, RankEvent) and record.event in ("died", "stopped", "resumed"):
            self.status = "running" if record.event == "resumed" else record.event
            reason = record.detail.get("silent_reason")
            self.silent_reason = str(reason)[:32] if record.event == "stopped" else None

    def _take_step(self, step: Step) -> None:
        self.step, self.last_step_time = step.step, step.time
        self.steps += 1
        self.samples += step.samples
        self.tokens += step.tokens
        self.memory_allocated_bytes = step.memory_allocated_bytes
        for name, seconds in step.phases_s.items():
            if name in self.phases_s or len(self.phases_s) < 16:
                self.phases_s[name] = self.phases_s.get(name, 0.0) + seconds
        self.durations.add(step.duration_s)
        self.recent.add(step)

    def state(self, job: JobId, host: str) -> RankState:
        return RankState(
            rank=self.seen.rank,
            name=str(self.seen.rank),
            **job.fields(),
            pid=0,
            host=host,
            world_size=self.seen.world_size,
            device=self.seen.device,
            pod_uid=self.seen.pod_uid or None,
            status=self.status,
            silent_reason=self.silent_reason,
            first_time=self.seen.time,
            seen_time=self.seen.time,
            last_step_time=self.last_step_time,
            step=self.step,
            steps_total=self.steps,
            samples_total=self.samples,
            tokens_total=self.tokens,
            phases_s=dict(self.phases_s),
            durations=self.durations.histogram(),
            recent_s=tuple(self.recent),
            **(self.recent.pace() if self.is_live else {}),
            memory_allocated_bytes=self.memory_allocated_bytes,
        )
