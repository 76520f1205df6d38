"""What requests ask for, each body written once; `/openapi.json` describes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from warpwatch_telemetry.capture_id import PATTERN
from warpwatch_telemetry.captures import STEP_KINDS, AnomalySeen, CaptureKind, CaptureRequest
from warpwatch_telemetry.sections import AnomalyKind

Rank = Annotated[int, Field(ge=0, lt=2**31)]


class AnomalySeenBody(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rank: Rank | None = None
    begin_step: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class CaptureBody(BaseModel):
    """What ``POST /api/v1/captures`` asks for."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    job: str = Field(min_length=1, max_length=512)
    owner: str = Field("", max_length=128, description="whose job; empty: one has this name")
    kind: CaptureKind = "torch"
    ranks: Annotated[list[Rank], Field(min_length=1, max_length=1024)] | None = Field(
        None, description="null: all ranks of the job that this daemon sees"
    )
    steps: int = Field(5, ge=1, le=100)
    options: tuple[Literal["stacks", "shapes", "memory"], ...] = Field(
        (), description="of kind torch: what it records besides, at a price"
    )
    backend: Literal["shim"] | None = Field(
        None, deprecated=True, description="ignored; fleets of version 0.2 send it"
    )
    reason: str = Field("", max_length=500)
    run: str = Field("", max_length=512, description="which start of the job; empty: the only one")
    id: Annotated[str, Field(pattern=PATTERN)] | None = Field(
        None, description="of a fleet: what the capture is called on all nodes"
    )
    start_step: Annotated[int, Field(ge=2, lt=2**63)] | None = Field(
        None, description="of a fleet: the first step to record on all nodes"
    )
    anomaly_id: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        None, description="of a fleet: its anomaly that asks, so that the policy of triggers holds"
    )
    anomaly_kind: AnomalyKind | None = None
    anomaly_seen: AnomalySeenBody | None = Field(
        None, description="of a fleet: what its anomaly had seen"
    )
    scheduled: bool = Field(
        False, description="of a fleet: by `fleet.schedules`, so that triggers.baseline holds"
    )
    alerts: tuple[Annotated[str, Field(max_length=200)], ...] = Field(
        (), max_length=100, description="of a fleet: keys of the alerts that ask for it"
    )

    @property
    def is_of_a_fleet(self) -> bool:
        """Whether it says what only who may see all jobs may say."""
        about = (self.id, self.start_step, self.anomaly_id, self.anomaly_seen)
        return self.scheduled or bool(self.alerts) or any(one is not None for one in about)

    @model_validator(mode="after")
    def _a_start_is_of_steps(self) -> CaptureBody:
        if self.start_step is not None and self.kind not in STEP_KINDS:
            raise ValueError(f"start_step: {self.kind} has no steps")
        if not self.alerts and (self.anomaly_id is None) != (self.anomaly_kind is None):
            raise ValueError("anomaly_id and anomaly_kind are needed together")
        return self

    @model_validator(mode="after")
    def _options_are_of_traces(self) -> CaptureBody:
        if self.options and self.kind != "torch":
            raise ValueError(f"options: kind torch has them, {self.kind} has none")
        return self

    @property
    def _trigger(self) -> str:
        if self.anomaly_id:
            return "anomaly"
        if self.alerts:
            return "alert"
        return "schedule" if self.scheduled else "manual"

    def request(self, owner: str | None) -> CaptureRequest:
        """``owner``: whose jobs alone may be captured, None for everybody's."""
        seen = self.anomaly_seen
        return CaptureRequest(
            job=self.job,
            owner=self.owner if owner is None else owner,
            kind=self.kind,
            run=self.run,
            trigger=self._trigger,
            alerts=self.alerts,
            anomaly_id=self.anomaly_id,
            anomaly_kind=self.anomaly_kind,
            anomaly_seen=None if seen is None else AnomalySeen(**seen.model_dump()),
            ranks=None if self.ranks is None else tuple(sorted(set(self.ranks))),
            steps=self.steps,
            options=tuple(sorted(set(self.options))),
            reason=self.reason,
        )
