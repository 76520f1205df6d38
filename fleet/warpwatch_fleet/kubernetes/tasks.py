"""All that the fleet does in its cluster, as coroutines for the loop that follows the agents."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from warpwatch_fleet.captures.requests import FleetCaptures
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.config import FleetConfig
from warpwatch_fleet.kubernetes.api import KubernetesClient, KubernetesError
from warpwatch_fleet.kubernetes.captures import CaptureObjects
from warpwatch_fleet.kubernetes.conditions import Conditions, Taints
from warpwatch_fleet.kubernetes.events import EventPublisher
from warpwatch_fleet.kubernetes.injection import InjectionServer
from warpwatch_fleet.source import FleetSource
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.log_output import Complaint

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0

Round = Callable[[], Awaitable[None]]
Count = Callable[[], None]


class Kubernetes:
    """Raises UsageError."""

    def __init__(
        self,
        config: FleetConfig,
        cluster: Cluster,
        captures: FleetCaptures,
        metrics: AgentMetrics,
        source: FleetSource,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        own = config.kubernetes
        self._sleep = sleep
        link = config.public_url or ""
        self._server = InjectionServer(own.injection) if own.injection else None
        self._rounds: list[tuple[Round, Count]] = []
        self._api: KubernetesClient | None = None
        if not (own.events or own.conditions or own.captures):
            return
        self._api = api = KubernetesClient(own.service_account)
        self._errors = metrics.counter("fleet_kubernetes_errors_total")
        events = EventPublisher(api, cluster, link) if own.events else None
        if own.conditions:
            conditions = Conditions(api, cluster)
            self._add("conditions", conditions.advance)
            if own.taints:
                taints = Taints(api, own, conditions, events)
                # So that all workers together keep to `max_tainted`.
                self._add("taints", partial(source.alone, taints.advance))
        if events is not None:
            self._add("events", events.advance)
        if own.captures:
            objects = CaptureObjects(api, captures, cluster.lock, link)
            self._add("captures", objects.advance)

    def _add(self, what: str, work: Round) -> None:
        # The counter is there from the start, so that an increase can be seen.
        self._rounds.append((work, self._errors.labels(what).inc))

    async def run(self) -> None:
        """Run until cancelled."""
        works: list[Coroutine[Any, Any, None]] = [_again(*one, self._sleep) for one in self._rounds]
        if self._server is not None:
            works.append(self._server.run_beside())
        try:
            await asyncio.gather(*works)
        finally:
            if self._api is not None:
                await self._api.close()


async def _again(work: Round, failed: Count, sleep: Callable[[float], Awaitable[None]]) -> None:
    """Repeat the work. Errors of the server are counted, logged once, and tried again."""
    complaint = Complaint(logger, logging.WARNING)
    while True:
        try:
            await work()
            complaint.clear()
        except KubernetesError as error:
            failed()
            complaint.make("the API server of the cluster: %s", error)
        except Exception:
            logger.exception("a round in the cluster failed")
        await sleep(INTERVAL_S)
