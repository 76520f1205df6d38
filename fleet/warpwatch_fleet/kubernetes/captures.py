"""Objects of kind Capture: `kubectl apply` asks for a capture of a job of the object's namespace.

The result of one is in its status alone. It is asked for once: what a fleet that was killed
had begun is found again by the reason that it gave, and is never begun a second time.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any
from urllib.parse import quote

import msgspec
from pydantic import ValidationError

from warpwatch_capturing.finisher import DIAGNOSED_KINDS
from warpwatch_exporters.events import capture_link
from warpwatch_fleet.captures.requests import FleetCaptures
from warpwatch_fleet.kubernetes.api import (
    MERGE,
    KubernetesClient,
    KubernetesError,
    Metadata,
    Object,
    misshapen,
    seconds,
    timestamp,
)
from warpwatch_runtime.loading import mistakes
from warpwatch_runtime.log_output import Complaint
from warpwatch_serving.bodies import CaptureBody
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId

logger = logging.getLogger(__name__)

GROUP = "/apis/warpwatch.dev/v1alpha1"
PAGE, MAX_PAGES = "500", 40
# How long the verdict of a capture that has ended is waited for, and one that is no longer known.
VERDICT_S = 600.0
LOST_S = 120.0
# The fields that a tenant may set; the fleet sets the others.
FIELDS = ("job", "run", "kind", "ranks", "steps", "options", "reason")


class _Metadata(Metadata):
    namespace: str
    uid: str


class _Status(msgspec.Struct):
    time: datetime | None = None
    captureId: str = ""


class _CaptureObject(msgspec.Struct):
    metadata: _Metadata
    spec: dict[str, Any]
    status: _Status | None = None


class _ListMetadata(msgspec.Struct):
    more: str = msgspec.field(default="", name="continue")


class _CaptureList(msgspec.Struct):
    metadata: _ListMetadata
    items: list[dict[str, Any]]


class CaptureObjects:
    """The cluster's objects of kind Capture. ``advance`` needs a loop of its own.

    ``lock`` guards the captures that are shown. link: the fleet's own address, or empty.
    """

    def __init__(
        self,
        api: KubernetesClient,
        captures: FleetCaptures,
        lock: threading.Lock,
        link: str,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._captures = captures
        self._lock = lock
        self._link = link
        self._wall = wall
        self._complaint = Complaint(logger, logging.WARNING)

    async def advance(self) -> None:
        """Write the status of objects that have not ended. Raises KubernetesError."""
        for one in [one async for one in self._list() if self._is_open(one)]:
            status = one.get("status") or {}
            if "time" not in status:
                await self._begin(one)
            elif changed := self._progress(one, status):
                await self._put(one, changed)

    async def _list(self) -> AsyncIterator[Object]:
        params = {"limit": PAGE, "continue": ""}
        for _ in range(MAX_PAGES):
            page = await self._api.ask(
                "GET", f"{GROUP}/captures", params=params, shape=_CaptureList
            )
            for one in page["items"]:
                yield one
            params["continue"] = page["metadata"].get("continue", "")
            if not params["continue"]:
                return

    def _is_open(self, one: Object) -> bool:
        """Return whether the object has not ended, and this process evaluates the job."""
        if wrong := misshapen(one, _CaptureObject):
            self._complaint.make("an object of kind Capture is ignored: %s", wrong)
            return False
        if "endTime" in (one.get("status") or {}):
            return False
        # Without the mark of a second live run of its name.
        name = re.sub(r"#[0-9a-f]{6}$", "", str((one.get("spec") or {}).get("job", "")))
        return self._captures.is_mine(JobId(_owner(one), name, ""))

    async def _begin(self, one: Object) -> None:
        """Request the capture. The status is written first, so that a crash cannot repeat it."""
        asking = {"time": timestamp(self._wall()), "detail": "asking"}
        begun = await self._put(one, asking)
        if begun is not None:
            await self._put(begun, await self._request(begun))

    async def _request(self, one: Object) -> Object:
        """Request the capture, and return the new status."""
        try:
            capture = await self._captures.start(_body(one).request(_owner(one)))
        except ValidationError as error:
            return self._ended("refused_invalid", str(mistakes(error, CaptureBody)[0]))
        except Refused as error:
            return self._ended(error.reason, str(error))
        return {"captureId": capture.id, "detail": "running"}

    def _progress(self, one: Object, status: Object) -> Object:
        """Return the new status; a capture without an id in the status is found by its reason."""
        reason, known = _mark(one), status.get("captureId")
        with self._lock:
            shown = self._captures.shown()
        found = [
            capture
            for capture in shown
            if (capture.id == known if known else capture.request.reason.startswith(reason))
            and capture.request.owner == _owner(one)
        ]
        if found:
            return _news(found[0], self._link, status, self._wall())
        if self._wall() - seconds(status["time"]) > LOST_S:
            return self._ended("failed", "no longer known: the fleet was restarted meanwhile")
        return {}

    def _ended(self, outcome: str, detail: str) -> Object:
        return {"outcome": outcome, "detail": detail[:1024], "endTime": timestamp(self._wall())}

    async def _put(self, one: Object, status: Object) -> Object | None:
        """Return the object as the server has it now, or None if it has changed meanwhile."""
        about = one["metadata"]
        namespace, name = (quote(about[part], safe="") for part in ("namespace", "name"))
        path = f"{GROUP}/namespaces/{namespace}/captures/{name}/status"
        body = {"metadata": {"resourceVersion": about["resourceVersion"]}, "status": status}
        try:
            return await self._api.ask("PATCH", path, body, form=MERGE, shape=_CaptureObject)
        except KubernetesError as error:
            if error.status not in (404, 409):
                raise
            return None


def _owner(one: Object) -> str:
    """Return the owner of the jobs that it reaches: its own namespace."""
    return f"ns/{one['metadata']['namespace']}"


def _mark(one: Object) -> str:
    about = one["metadata"]
    return f"Capture {about['namespace']}/{about['name']} {about['uid'][:8]}"


def _body(one: Object) -> CaptureBody:
    """Return the request that the object describes. Raises ValidationError."""
    spec: dict[str, Any] = {name: one["spec"][name] for name in FIELDS if name in one["spec"]}
    spec["reason"] = f"{_mark(one)}: {spec.get('reason', '')}".removesuffix(": ")[:500]
    return CaptureBody.model_validate_json(msgspec.json.encode(spec))


def _news(capture: Capture, link: str, status: Object, now: float) -> Object:
    """Return the changed fields of the status."""
    if capture.outcome is None or capture.end_time is None:
        return {} if status.get("captureId") else {"captureId": capture.id, "detail": "running"}
    written = sum(rank.state == "written" for rank in capture.ranks)
    diagnosis = capture.diagnosis or {}
    fields: Object = {
        "captureId": capture.id,
        "outcome": capture.outcome,
        "ranks": f"{written}/{len(capture.ranks)}",
        "detail": capture.detail[:1024] or "done",
    }
    if diagnosis:
        fields["verdict"] = str(diagnosis.get("verdict", ""))
        fields["summary"] = str(diagnosis.get("summary", ""))[:1024]
    if link:
        fields["report"] = capture_link(link, capture)
    if capture.remote:
        fields["remote"] = capture.remote
    awaits = capture.request.kind in DIAGNOSED_KINDS and capture.outcome in ("complete", "partial")
    is_late = now - capture.end_time > VERDICT_S
    if diagnosis or capture.diagnosis_outcome or not awaits or is_late:
        fields["endTime"] = timestamp(capture.end_time)
    return fields if any(status.get(name) != value for name, value in fields.items()) else {}
