"""The routes that only the agent of a node has."""

from __future__ import annotations

import time
from collections.abc import Callable

from warpwatch_daemon.for_fleet import documents
from warpwatch_daemon.for_fleet.agent import Agent
from warpwatch_daemon.for_fleet.agent_api import AgentApi
from warpwatch_daemon.for_fleet.records import MEDIA_TYPE, RecordsEndpoint
from warpwatch_serving import bodies, models
from warpwatch_serving.access import Access
from warpwatch_serving.routes import Operation


def agent_routes(
    agent: Agent, access: Access, wall: Callable[[], float] = time.time
) -> tuple[AgentApi, list[Operation]]:
    """Return the API of an agent and the operations that only agents have."""
    api, records = AgentApi(agent, access), RecordsEndpoint(agent, access, wall)
    v1, of, refused = "/api/v1", Operation, (404, 409, 503)
    return api, [
        of(f"{v1}/records", records.send, MEDIA_TYPE, documents.RecordFilters, guarded=True,
           errors=(503,)),
        of(f"{v1}/leases", api.lease, documents.LeaseAnswer, method="POST", guarded=True,
           body=documents.LeaseBody, errors=(409,)),
        of(f"{v1}/captures/prepare", api.prepare_capture, documents.PreparedCapture, method="POST",
           guarded=True, body=bodies.CaptureBody, errors=refused),
        of(f"{v1}/captures/{{id}}/cancel", api.cancel_capture, models.OneCapture, method="POST",
           guarded=True, errors=(404,)),
        of(f"{v1}/anomalies/{{id}}/resolve", api.resolve_anomaly, documents.ResolvedAnomaly,
           method="POST", guarded=True, errors=(404, 409)),
    ]  # fmt: skip
