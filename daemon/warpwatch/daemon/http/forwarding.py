"""Passing alerts on to other nodes' daemons, off the thread that serves and for a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter

from warpwatch.daemon.alerts.desk import Answer
from warpwatch.daemon.alerts.peers import PeerError, Peers, failed
from warpwatch.daemon.alerts.webhook import Alert

# Together less than the ten seconds that Alertmanager gives a notification at least.
RESOLVE_TIMEOUT_S = 2.0
# What the connection may take (peers.TIMEOUT_S), and the wait for a worker.
PASS_ON_TIMEOUT_S = 6.0
MAX_PEERS = 8
# Of all webhooks together.
MAX_WORKERS = 8

T = TypeVar("T")


class Forwarding:
    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._workers: CapacityLimiter | None = None
        # Nobody else holds a task that was given up.
        self._tasks: set[asyncio.Task[Any]] = set()

    async def addresses(self) -> frozenset[str]:
        """Where the daemons are now. Raises PeerError."""
        return await self._soon(self._peers.addresses, RESOLVE_TIMEOUT_S)

    async def pass_on(self, alerts: Sequence[Alert]) -> list[Answer]:
        """What the daemons at the alerts' hosts, which must be of ``addresses``, say of each."""
        hosts = list(dict.fromkeys(alert.host for alert in alerts))
        said = await asyncio.gather(
            *(
                self._ask(host, [alert for alert in alerts if alert.host == host])
                for host in hosts[:MAX_PEERS]
            )
        )
        answers = dict(zip(hosts, map(iter, said), strict=False))
        beyond = f"one webhook is passed on to {MAX_PEERS} daemons at most"
        return [
            next(answers[alert.host]) if alert.host in answers else failed([alert], beyond)[0]
            for alert in alerts
        ]

    async def _ask(self, address: str, alerts: Sequence[Alert]) -> list[Answer]:
        try:
            return await self._soon(lambda: self._peers.pass_on(address, alerts), PASS_ON_TIMEOUT_S)
        except PeerError as error:
            return failed(alerts, f"{address}: {error}")

    async def _soon(self, work: Callable[[], T], timeout_s: float) -> T:
        """What ``work`` brings in a worker. Raises PeerError when it takes too long.

        What is given up keeps its worker until it ends: there are never more than MAX_WORKERS.
        """
        if self._workers is None:
            self._workers = CapacityLimiter(MAX_WORKERS)
        running = anyio.to_thread.run_sync(work, limiter=self._workers)
        task = asyncio.ensure_future(running)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            raise PeerError("no answer in time")
        return task.result()
