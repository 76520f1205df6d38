"""The input of requests: filters in the query and JSON bodies, each read into its model.

`/openapi.json` describes the models. A body is declared as JSON, of a bounded size, and there in
time. Every error is an HttpError.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from starlette.requests import ClientDisconnect, Request

from warpwatch_runtime.loading import mistakes
from warpwatch_serving.answers import HttpError
from warpwatch_telemetry.alerts import Alert
from warpwatch_telemetry.anomalies import KINDS
from warpwatch_telemetry.captures import (
    CAPTURE_ID,
    CAPTURE_KINDS,
    STEP_KINDS,
    AnomalySeen,
    CaptureKind,
    CaptureRequest,
)
from warpwatch_telemetry.sections import AnomalyKind

MAX_BODY_BYTES = 2**20
BODY_TIMEOUT_S = 10.0
# An error names what was found there; it may be long.
MAX_ERROR_CHARS = 200

F = TypeVar("F", bound="Filters")
M = TypeVar("M", bound=BaseModel)


def filters(request: Request, model: type[F]) -> F:
    """Return the filters in the query. Raises HttpError."""
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise _explained(error, model, "query: ") from error


async def json_body(request: Request, model: type[M]) -> M:
    """Return the body as an instance of the model. Raises HttpError."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(415, "not_json", "the body must be JSON: Content-Type: application/json")
    content = await read_body(request)
    try:
        return model.model_validate_json(content, strict=True)
    except ValidationError as error:
        raise _explained(error, model) from error


async def read_body(request: Request) -> bytes:
    """Return the bytes of the body. Raises HttpError if they are too many or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise too_large()
    except (TimeoutError, ClientDisconnect) as error:
        raise HttpError(408, "timeout", "the body did not arrive in time") from error
    return bytes(body)


def too_large() -> HttpError:
    """Return the refusal of a body that is too large."""
    return HttpError(413, "too_large", f"a body may have {MAX_BODY_BYTES} bytes at most")


def _explained(error: ValidationError, model: type[BaseModel], where: str = "") -> HttpError:
    """Return the first mistake, in one line."""
    text = mistakes(error, model)[0].without_value()
    return HttpError(400, "bad_request", where + text[:MAX_ERROR_CHARS])


# --- filters: the parameters of lists, as they are named in the query ---

KnownKind = Annotated[str, Field(json_schema_extra={"enum": list(KINDS)})]
CaptureKindName = Annotated[str, Field(json_schema_extra={"enum": list(CAPTURE_KINDS)})]


class Filters(BaseModel):
    """Filters of a list; a filter that is not given admits everything."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def admits(self, **values: object) -> bool:
        """Return whether the filters admit something with these values, by the filters' names."""
        return all(getattr(self, name) in (None, value) for name, value in values.items())


class JobFilters(Filters):
    job: str | None = None
    owner: str | None = None


class PageFilters(JobFilters):
    """q: text in the name of a job, owner or node, or in an anomaly's kind; all: long lists whole.

    A form sends the fields that are left empty as empty strings: these admit everything, too.
    """

    node: str | None = None
    q: Annotated[str | None, Field(max_length=100)] = None
    all: bool | None = None
    show: str | None = None

    @field_validator("*", mode="before")
    @classmethod
    def _given(cls, value: object) -> object:
        return value or None

    def link(self, **changes: object) -> str:
        """Return the address of the page with these filters and ``changes``; None drops one."""
        kept = {**self.model_dump(exclude={"show"}), **changes}
        given = {name: "true" if value is True else value for name, value in kept.items() if value}
        return f"/?{urlencode(given)}" if given else "/"

    def only(self, **filters: object) -> str:
        """Return the address of the page with ``filters`` and no others."""
        return self.link(**{**dict.fromkeys(type(self).model_fields), **filters})


class RunFilters(JobFilters):
    run: str | None = None
    active: bool | None = None


class DetectorFilters(JobFilters):
    kind: KnownKind | None = None


class AnomalyFilters(DetectorFilters):
    active: bool | None = None


class DiagnosisFilters(JobFilters):
    kind: CaptureKindName | None = None


class CaptureFilters(DiagnosisFilters):
    active: bool | None = None


class LoginFilters(Filters):
    """key: the key in the link that `warpwatch page` prints."""

    key: Annotated[str | None, Field(max_length=100)] = None


# --- bodies ---

Rank = Annotated[int, Field(ge=0, lt=2**31)]


class AnomalySeenBody(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rank: Rank | None = None
    begin_step: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class CaptureBody(BaseModel):
    """The body of ``POST /api/v1/captures``."""

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
    id: Annotated[str, Field(pattern=CAPTURE_ID.pattern)] | None = Field(
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
        """Whether it has fields that only a caller with the rights to all jobs may use."""
        about = (self.id, self.start_step, self.anomaly_id, self.anomaly_seen)
        return self.scheduled or bool(self.alerts) or any(one is not None for one in about)

    @model_validator(mode="after")
    def _fields_fit(self) -> CaptureBody:
        if self.start_step is not None and self.kind not in STEP_KINDS:
            raise ValueError(f"start_step: {self.kind} has no steps")
        if not self.alerts and (self.anomaly_id is None) != (self.anomaly_kind is None):
            raise ValueError("anomaly_id and anomaly_kind are needed together")
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
        """Return the request; ``owner``: the only one whose jobs may be captured, None for all."""
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


class AlertmanagerPayload(BaseModel):
    """A notification, each alert with a fingerprint; fields that are not named here are ignored.

    Alertmanager's webhook, version 4, and Grafana's, which has more fields:
    https://prometheus.io/docs/alerting/latest/configuration/#webhook_config
    """

    alerts: list[Alert]

    @field_validator("alerts")
    @classmethod
    def _identified(cls, alerts: list[Alert]) -> list[Alert]:
        return [alert if alert.fingerprint else _with_fingerprint(alert) for alert in alerts]


def _with_fingerprint(alert: Alert) -> Alert:
    """Return the alert with a fingerprint, which Alertmanager before 0.19 does not send."""
    written = json.dumps(alert.labels, sort_keys=True).encode()
    fingerprint = hashlib.sha256(written).hexdigest()[:16]
    return alert.model_copy(update={"fingerprint": fingerprint})
