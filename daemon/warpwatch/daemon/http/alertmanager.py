"""``POST /api/v1/alertmanager``: alerts that fire ask for captures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter
from starlette.requests import Request
from starlette.responses import Response

from warpwatch.daemon.alerts.desk import Answer
from warpwatch.daemon.alerts.peers import FORWARDED_HEADER, PeerError, Peers, failed
from warpwatch.daemon.alerts.webhook import Alert, NotAWebhookError, decode
from warpwatch.daemon.config import HttpConfig
from warpwatch.daemon.http.access import Access
from warpwatch.daemon.http.answers import ApiError, json_answer
from warpwatch.daemon.http.backend import Backend
from warpwatch.daemon.http.bodies import json_body
from warpwatch.daemon.http.forwarding import Forwarding
from warpwatch.telemetry.alerts import NO_RANK, PEER_FAILED

# Webhooks that are being answered: each may hold a body in memory.
MAX_AT_ONCE = 16
# Answers that are written; the rest of them is counted.
MAX_ANSWERS = 1000
# They take turns at the desk anyway.
WORKERS = 2


class AlertWebhook:
    """``receive`` answers 200 also where nothing is captured: asking again would change nothing."""

    def __init__(self, backend: Backend, access: Access, config: HttpConfig) -> None:
        self._backend = backend
        self._access = access
        self._forwarding: Forwarding | None = None
        if config.peers is not None:
            peers = Peers(config.peers, config.token_file, config.peers_ca_file)
            self._forwarding = Forwarding(peers)
        self._workers: CapacityLimiter | None = None
        self._busy = 0

    async def receive(self, request: Request) -> Response:
        self._access.check_change(request)
        if self._busy >= MAX_AT_ONCE:
            # Of what says no, Alertmanager asks again only after a status of the server's.
            retry = {"Retry-After": "1"}
            raise ApiError(503, "busy", "too many webhooks are being answered", retry)
        self._busy += 1
        try:
            return await self._answer(request)
        finally:
            self._busy -= 1

    async def _answer(self, request: Request) -> Response:
        try:
            alerts = decode(await json_body(request))
        except NotAWebhookError as error:
            raise ApiError(400, "bad_request", str(error)) from error
        own = str((request.scope.get("server") or ("",))[0]).lower()
        if self._forwarding is None or FORWARDED_HEADER in request.headers:
            answers = await self._at_desk(alerts, own)
        else:
            answers = await self._with_peers(self._forwarding, alerts, own)
        for outcome, count in Counter(answer.outcome for answer in answers).items():
            self._backend.count_alerts(outcome, count)
        return json_answer(_document(answers))

    async def _at_desk(
        self, alerts: Sequence[Alert], own: str, peers: frozenset[str] = frozenset()
    ) -> list[Answer]:
        """It looks at the store's disk, which may be slow: off the thread that serves."""
        if self._workers is None:
            self._workers = CapacityLimiter(WORKERS)
        work = partial(self._backend.receive_alerts, alerts, (own,), peers)
        return list(await anyio.to_thread.run_sync(work, limiter=self._workers))

    async def _with_peers(
        self, forwarding: Forwarding, alerts: Sequence[Alert], own: str
    ) -> list[Answer]:
        """Where the ranks of an alert are not here, the answer is another daemon's."""
        if not {alert.host for alert in alerts} - {"", own}:
            return await self._at_desk(alerts, own)
        try:
            peers, problem = await forwarding.addresses() - {own}, ""
        except PeerError as error:
            peers, problem = frozenset[str](), str(error)
        answers = await self._at_desk(alerts, own, peers)
        elsewhere = [
            place
            for place, alert in enumerate(alerts)
            if answers[place].outcome == NO_RANK
            and (alert.host in peers or (problem and alert.host not in ("", own)))
        ]
        asked = [alerts[place] for place in elsewhere]
        said = failed(asked, problem) if problem else await self._passed_on(forwarding, asked, own)
        for place, answer in zip(elsewhere, said, strict=True):
            answers[place] = answer
        return answers

    async def _passed_on(
        self, forwarding: Forwarding, alerts: Sequence[Alert], own: str
    ) -> list[Answer]:
        """What a daemon that is gone cannot answer is for this one, if it has the job too."""
        said = await forwarding.pass_on(alerts) if alerts else []
        lost = [place for place, answer in enumerate(said) if answer.outcome == PEER_FAILED]
        if lost:
            local = await self._at_desk([alerts[place] for place in lost], own)
            for place, answer in zip(lost, local, strict=True):
                said[place] = said[place] if answer.outcome == NO_RANK else answer
        return said


def _document(answers: Sequence[Answer]) -> dict[str, Any]:
    written = [answer._asdict() for answer in answers[:MAX_ANSWERS]]
    return {"alerts": written, "unlisted": max(0, len(answers) - MAX_ANSWERS)}
