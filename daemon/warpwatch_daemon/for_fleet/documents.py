"""The documents of what only agents answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, RootModel, model_validator

from warpwatch_serving.models import Filters
from warpwatch_telemetry.captures import Prepared
from warpwatch_telemetry.sections import AnomalyKind


class RecordFilters(Filters):
    """after: the cursor of the last batch; shard: ``index/of`` of those who share the jobs."""

    after: Annotated[str | None, Field(max_length=64)] = None
    follow: bool = False
    shard: Annotated[str, Field(pattern=r"^\d{1,3}/\d{1,3}$")] = "0/1"

    @model_validator(mode="after")
    def _shard_exists(self) -> RecordFilters:
        index, of = self.parts
        if index >= of:
            raise ValueError(f"shard: there is no {index} of {of}; they count from 0")
        return self

    @property
    def parts(self) -> tuple[int, int]:
        index, _, of = self.shard.partition("/")
        return int(index), int(of)


class LeaseAnswer(BaseModel):
    seconds: float


class PreparedCapture(RootModel[Prepared]):
    pass


class ResolvedAnomaly(BaseModel):
    """``summary``: what it says of itself now that it is over."""

    id: str
    summary: str


class LeaseBody(BaseModel):
    """What ``POST /api/v1/leases`` asks for: that a fleet judges the job, not this node."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    job: Annotated[str, Field(min_length=1, max_length=512)]
    owner: Annotated[str, Field(max_length=128)]
    run: Annotated[str, Field(max_length=512)]
    holder: Annotated[
        str, Field(min_length=1, max_length=253, description="the fleet; another one is refused")
    ]
    seconds: Annotated[float, Field(gt=0, le=60)]
    raised: Annotated[
        dict[AnomalyKind, Annotated[str, Field(min_length=1, max_length=64)]],
        Field(description="ids of what the fleet has raised of the job and is active, by kind"),
    ] = {}
