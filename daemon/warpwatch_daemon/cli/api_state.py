"""Reads an agent or a fleet over its API, into the types of its web page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from warpwatch._version import __version__
from warpwatch_daemon.api_client import ApiClient
from warpwatch_serving.answers import AnomalyReport, DeviceReport
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.errors import WarpwatchError
from warpwatch_telemetry.samples import SourceHealth
from warpwatch_telemetry.state import JobState, RankState, State

_OF_JOBS = ("jobs", "ranks", "anomalies", "captures")
# A daemon of the version before does not send these of an anomaly.
_SINCE_0_3: Mapping[str, Any] = {"decision": None, "scope": "job"}


def read_lists(api: ApiClient, query: str = "") -> dict[str, Any]:
    """Return the lists of the API by name, those of jobs filtered. Raises WarpwatchError."""
    lists: dict[str, Any] = {"devices": api.get("/api/v1/devices")["devices"]}
    lists |= {name: api.get(f"/api/v1/{name}{query}")[name] for name in _OF_JOBS}
    return lists | {"sources": api.get("/readyz", accepted=503)["sources"]}


def to_state(lists: Mapping[str, Any], now: float) -> State:
    """Return the state that the lists describe; its anomalies are AnomalyReports.

    now: wall clock, seconds. Raises WarpwatchError.
    """
    anomalies = [{"sentence": one["summary"], **_SINCE_0_3, **one} for one in lists["anomalies"]]
    try:
        devices = msgspec.convert(lists["devices"], list[DeviceReport])
        return State(
            now,
            __version__,
            "",
            devices=tuple(device.sample() for device in devices),
            sources=msgspec.convert(lists["sources"], tuple[SourceHealth, ...]),
            ranks=msgspec.convert(lists["ranks"], tuple[RankState, ...]),
            jobs=msgspec.convert(lists["jobs"], tuple[JobState, ...]),
            anomalies=msgspec.convert(anomalies, tuple[AnomalyReport, ...]),
            captures=msgspec.convert(lists["captures"], tuple[Capture, ...]),
        )
    except msgspec.ValidationError as error:
        raise WarpwatchError(f"the answer has another form: {error}") from error
