"""``POST /api/v1/alertmanager``: alerts that fire ask for captures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import anyio.to_thread
from anyio import CapacityLimiter
from starlette.requests import Request
from starlette.responses import Response

from warpwatch_daemon.captures.alerts.alert_requests import Answer, NotReadyError
from warpwatch_daemon.captures.alerts.peers import FORWARDED_HEADER, Peers, failed
from warpwatch_daemon.captures.alerts.webhook import Alert, NotAWebhookError, decode, plain
from warpwatch_daemon.config.sections import HttpConfig
from warpwatch_daemon.http.access import Access
from warpwatch_daemon.http.answers import ApiError, json_answer
from warpwatch_daemon.http.backend import Backend
from warpwatch_daemon.http.bodies import json_body
from warpwatch_daemon.http.forwarding import Forwarding, Places
from warpwatch_daemon.http.models import AlertAnswer, AlertAnswers
from warpwatch_telemetry.alerts import NO_RANK, PEER_FAILED

# Webhooks that are being answered: each may hold a body in memory.
MAX_AT_ONCE = 16
# Answers that are written; the rest of them is counted.
MAX_ANSWERS = 1000
# They take turns anyway: one webhook is answered at a time.
WORKERS = 2
# Of what says no, Alertmanager asks again only after a status of the server's.
_RETRY = {"Retry-After": "1"}


class AlertWebhook:
    """``receive`` answers 200 also where nothing is captured, if asking again would change nothing.

    Else it answers 503: what was captured meanwhile is known by its alert.
    """

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
            raise ApiError(503, "busy", "too many webhooks are being answered", _RETRY)
        self._busy += 1
        try:
            return await self._answer(request)
        except NotReadyError as error:
            raise ApiError(503, "starting", str(error), _RETRY) from error
        finally:
            self._busy -= 1

    async def _answer(self, request: Request) -> Response:
        try:
            alerts = decode(await json_body(request))
        except NotAWebhookError as error:
            raise ApiError(400, "bad_request", str(error)) from error
        own = plain(str((request.scope.get("server") or ("",))[0]))
        if self._forwarding is None or FORWARDED_HEADER in request.headers:
            answers = await self._ask_here(alerts, frozenset({own}))
        else:
            answers = await self._or_said_before(self._forwarding, alerts, own)
        outcomes = Counter(answer.outcome for answer in answers)
        for outcome, count in outcomes.items():
            self._backend.count_alerts(outcome, count)
        if PEER_FAILED in outcomes:
            return json_answer(_document(answers), 503, _RETRY)
        return json_answer(_document(answers))

    async def _ask_here(
        self,
        alerts: Sequence[Alert],
        own_names: frozenset[str],
        peers: frozenset[str] = frozenset(),
    ) -> list[Answer]:
        """It waits for the capture that is being begun: off the thread that serves."""
        if self._workers is None:
            self._workers = CapacityLimiter(WORKERS)
        work = partial(self._backend.receive_alerts, alerts, own_names, peers)
        return list(await anyio.to_thread.run_sync(work, limiter=self._workers))

    async def _or_said_before(
        self, forwarding: Forwarding, alerts: Sequence[Alert], own: str
    ) -> list[Answer]:
        """What a peer has answered already leaves its place to what nobody has."""
        answers = [forwarding.said(alert) for alert in alerts]
        new = [alert for alert, answer in zip(alerts, answers, strict=True) if answer is None]
        rest = iter(await self._with_peers(forwarding, new, own))
        return [next(rest) if answer is None else answer for answer in answers]

    async def _with_peers(
        self, forwarding: Forwarding, alerts: Sequence[Alert], own: str
    ) -> list[Answer]:
        """Where the ranks of an alert are not here, the answer is another daemon's."""
        hosts = {alert.host for alert in alerts if alert.status == "firing"} - {"", own}
        if not hosts:
            return await self._ask_here(alerts, frozenset({own}))
        places = await forwarding.places(hosts, own)
        answers = await self._ask_here(alerts, places.own, frozenset(places.peers))
        asked: list[int] = []
        for place, alert in enumerate(alerts):
            if answers[place].outcome != NO_RANK:
                continue
            if alert.host in places.unknown:
                answers[place] = failed([alert], places.unknown[alert.host])[0]
            elif alert.host in places.peers:
                asked.append(place)
        said = await self._passed_on(forwarding, [alerts[place] for place in asked], places)
        for place, answer in zip(asked, said, strict=True):
            answers[place] = answer
        return answers

    async def _passed_on(
        self, forwarding: Forwarding, alerts: Sequence[Alert], places: Places
    ) -> list[Answer]:
        """What a daemon that is gone cannot answer is for this one, if it has the job too."""
        said = await forwarding.pass_on(alerts, places) if alerts else []
        lost = [place for place, answer in enumerate(said) if answer.outcome == PEER_FAILED]
        if lost:
            local = await self._ask_here([alerts[place] for place in lost], places.own)
            for place, answer in zip(lost, local, strict=True):
                said[place] = said[place] if answer.outcome == NO_RANK else answer
        return said


def _document(answers: Sequence[Answer]) -> AlertAnswers:
    listed = [AlertAnswer.model_validate(answer) for answer in answers[:MAX_ANSWERS]]
    return AlertAnswers(alerts=listed, unlisted=max(0, len(answers) - MAX_ANSWERS))
