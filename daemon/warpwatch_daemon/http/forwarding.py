"""Passing alerts on to other nodes' daemons, off the thread that serves and for a bounded time."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter

from warpwatch_daemon.captures.alerts.alert_requests import (
    MAX_ALERTS,
    MAX_REMEMBERED,
    REMEMBER_S,
    Answer,
)
from warpwatch_daemon.captures.alerts.peers import PeerError, Peers, failed
from warpwatch_daemon.captures.alerts.webhook import Alert, is_address, is_name
from warpwatch_telemetry.alerts import PEER_FAILED

# Together less than the ten seconds that Alertmanager gives a notification at least.
RESOLVE_TIMEOUT_S = 2.0
# What the connection may take (peers.TIMEOUT_S), and the wait for a worker.
PASS_ON_TIMEOUT_S = 6.0
MAX_PEERS = 8
# Names of alerts' hosts that one webhook has looked up: as many as alerts are looked at.
MAX_NAMES = MAX_ALERTS
# Of all webhooks together, for each of what they wait for.
MAX_WORKERS = 8
# A peer's answer without a capture: through the repetitions of a webhook that was answered 503,
# not until the group's next notification (Alertmanager's default group_interval: 5 minutes).
ANSWERED_S = 240.0

T = TypeVar("T")


class LocatedHosts(NamedTuple):
    """Hosts that alerts name. own: those that are this node; peers: a peer's address by host.

    unknown: why it could not be found out, by host.
    """

    own: frozenset[str]
    peers: Mapping[str, str]
    unknown: Mapping[str, str]


class Forwarding:
    def __init__(self, peers: Peers, clock: Callable[[], float] = time.monotonic) -> None:
        self._peers = peers
        self._resolving = _BoundedThreads()
        self._looking_up = _BoundedThreads()
        self._asking = _BoundedThreads()
        self._answered = _AnswerCache(clock)
        # When each address was asked last, in turns: the one asked longest ago is next.
        self._asked: dict[str, int] = {}
        self._turn = 0

    def earlier_answer(self, alert: Alert) -> Answer | None:
        """A peer's answer to this firing, where asking again would bring nothing new."""
        return self._answered.get(alert.key) if alert.status == "firing" else None

    async def locate(self, hosts: Collection[str], own: str) -> LocatedHosts:
        """Where these hosts are. ``own``: the address of this node."""
        elsewhere = [host for host in dict.fromkeys(hosts) if host not in ("", own)]
        names = [host for host in elsewhere if is_name(host)][:MAX_NAMES]
        try:
            peers, (addresses, unknown) = await asyncio.gather(
                self._resolving.run(self._peers.addresses, RESOLVE_TIMEOUT_S),
                self._look_up(names),
            )
        except PeerError as error:
            return LocatedHosts(frozenset({own}), {}, dict.fromkeys(elsewhere, str(error)))
        addresses |= {host: frozenset({host}) for host in elsewhere if is_address(host)}
        own_names = {own} | {host for host, found in addresses.items() if own in found}
        of_peers = {
            host: min(found & peers)
            for host, found in addresses.items()
            if host not in own_names and found & peers
        }
        return LocatedHosts(frozenset(own_names), of_peers, unknown)

    async def _look_up(
        self, names: Sequence[str]
    ) -> tuple[dict[str, frozenset[str]], dict[str, str]]:
        """The addresses of each; for those that are missing, why they cannot be known now."""
        addresses: dict[str, frozenset[str]] = {}
        unknown: dict[str, str] = {}

        async def look_up(name: str) -> None:
            try:
                addresses[name] = await self._looking_up.run(
                    lambda: self._peers.resolve(name), RESOLVE_TIMEOUT_S
                )
            except PeerError as error:
                unknown[name] = str(error)

        await asyncio.gather(*(look_up(name) for name in names))
        return addresses, unknown

    async def pass_on(self, alerts: Sequence[Alert], hosts: LocatedHosts) -> list[Answer]:
        """The answers of the daemons at the alerts' hosts, which must be in ``hosts.peers``."""
        of_address: dict[str, list[Alert]] = {}
        for alert in alerts:
            of_address.setdefault(hosts.peers[alert.host], []).append(alert)
        chosen = sorted(of_address, key=lambda address: self._asked.get(address, 0))[:MAX_PEERS]
        self._take_turn(chosen)
        asked = await asyncio.gather(*(self._ask(one, of_address[one]) for one in chosen))
        answers = dict(zip(chosen, map(iter, asked), strict=True))
        beyond = f"one webhook is passed on to {MAX_PEERS} daemons at most"
        return [
            next(answers[address]) if address in answers else failed([alert], beyond)[0]
            for alert, address in ((alert, hosts.peers[alert.host]) for alert in alerts)
        ]

    def _take_turn(self, addresses: Sequence[str]) -> None:
        self._turn += 1
        if len(self._asked) > MAX_REMEMBERED:
            self._asked.clear()
        self._asked |= dict.fromkeys(addresses, self._turn)

    async def _ask(self, address: str, alerts: Sequence[Alert]) -> list[Answer]:
        try:
            answers = await self._asking.run(
                lambda: self._peers.pass_on(address, alerts), PASS_ON_TIMEOUT_S
            )
        except PeerError as error:
            return failed(alerts, f"{address}: {error}")
        for alert, answer in zip(alerts, answers, strict=True):
            if answer.outcome != PEER_FAILED:
                self._answered.put(alert.key, answer)
        return answers


class _AnswerCache:
    """Answers of peers, by the alert's key; the oldest are forgotten."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: OrderedDict[str, tuple[float, Answer]] = OrderedDict()

    def get(self, key: str) -> Answer | None:
        until, answer = self._answers.get(key, (0.0, None))
        if answer is not None and until < self._clock():
            del self._answers[key]
            return None
        return answer

    def put(self, key: str, answer: Answer) -> None:
        keep_s = ANSWERED_S if answer.capture_id is None else REMEMBER_S
        self._answers.pop(key, None)
        self._answers[key] = (self._clock() + keep_s, answer)
        if len(self._answers) > MAX_REMEMBERED:
            self._answers.popitem(last=False)


class _BoundedThreads:
    """At most MAX_WORKERS threads; waiting for one has a time-out."""

    def __init__(self) -> None:
        # It belongs to the loop that serves, which runs later.
        self._limiter: CapacityLimiter | None = None
        # The loop itself keeps only weak references to a task that was given up.
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Callable[[], T], timeout_s: float) -> T:
        """What ``work`` returns. Raises PeerError when it takes too long.

        Work that is given up keeps its thread until it ends.
        """
        if self._limiter is None:
            self._limiter = CapacityLimiter(MAX_WORKERS)
        running = anyio.to_thread.run_sync(work, limiter=self._limiter)
        task = asyncio.ensure_future(running)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            raise PeerError("no answer in time")
        return task.result()
