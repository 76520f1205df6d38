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
from warpwatch_daemon.captures.alerts.webhook import Alert, Webhook, plain
from warpwatch_daemon.config.sections import HttpConfig
from warpwatch_daemon.http.access import Access
from warpwatch_daemon.http.agent import Agent
from warpwatch_daemon.http.answers import ApiError, json_answer
from warpwatch_daemon.http.forwarding import Forwarding, LocatedHosts
from warpwatch_daemon.http.models import AlertAnswer, AlertAnswers
from warpwatch_daemon.http.request_data import json_body
from warpwatch_telemetry.alerts import NO_RANK, PEER_FAILED

# Webhooks that are being answered: each may hold a body in memory.
MAX_AT_ONCE = 16
# Answers that are written; the rest of them is counted.
MAX_ANSWERS = 1000
# They take turns anyway: one webhook is answered at a time.
WORKERS = 2
# Alertmanager sends a refused notification again only after a status of 500 and above.
_RETRY = {"Retry-After": "1"}


class AlertWebhook:
    """``receive`` answers 200 also where nothing is captured, if asking again would change nothing.

    Else it answers 503: what was captured meanwhile is known by its alert.
    """

    def __init__(self, agent: Agent, access: Access, config: HttpConfig) -> None:
        self._agent = agent
        self._access = access
        self._forwarding: Forwarding | None = None
        if config.peers is not None:
            peers = Peers(config.peers, config.token_file, config.peers_ca_file)
            self._forwarding = Forwarding(peers)
        self._workers: CapacityLimiter | None = None
        self._busy = 0

    async def receive(self, request: Request) -> Response:
        """Alerts that fire ask for captures."""
        if not self._access.check_change(request).all_jobs:
            raise ApiError(403, "not_root", "alerts ask for everybody's jobs: only root may")
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
        alerts = (await json_body(request, Webhook)).alerts
        own = plain(str((request.scope.get("server") or ("",))[0]))
        if self._forwarding is None or FORWARDED_HEADER in request.headers:
            answers = await self._ask_here(alerts, frozenset({own}))
        else:
            answers = await self._ask_here_or_peers(self._forwarding, alerts, own)
        outcomes = Counter(answer.outcome for answer in answers)
        for outcome, count in outcomes.items():
            self._agent.count_alerts(outcome, count)
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
        work = partial(self._agent.receive_alerts, alerts, own_names, peers)
        return list(await anyio.to_thread.run_sync(work, limiter=self._workers))

    async def _ask_here_or_peers(
        self, forwarding: Forwarding, alerts: Sequence[Alert], own: str
    ) -> list[Answer]:
        """Alerts that a peer has answered already do not count against those that are new."""
        answers = [forwarding.earlier_answer(alert) for alert in alerts]
        new = [alert for alert, answer in zip(alerts, answers, strict=True) if answer is None]
        rest = iter(await self._ask_with_peers(forwarding, new, own))
        return [next(rest) if answer is None else answer for answer in answers]

    async def _ask_with_peers(
        self, forwarding: Forwarding, alerts: Sequence[Alert], own: str
    ) -> list[Answer]:
        """Where the ranks of an alert are not here, the answer is another daemon's."""
        hosts = {alert.host for alert in alerts if alert.status == "firing"} - {"", own}
        if not hosts:
            return await self._ask_here(alerts, frozenset({own}))
        located = await forwarding.locate(hosts, own)
        answers = await self._ask_here(alerts, located.own, frozenset(located.peers))
        elsewhere: list[int] = []
        for index, alert in enumerate(alerts):
            if answers[index].outcome != NO_RANK:
                continue
            if alert.host in located.unknown:
                answers[index] = failed([alert], located.unknown[alert.host])[0]
            elif alert.host in located.peers:
                elsewhere.append(index)
        passed_on = await self._pass_on(forwarding, [alerts[i] for i in elsewhere], located)
        for index, answer in zip(elsewhere, passed_on, strict=True):
            answers[index] = answer
        return answers

    async def _pass_on(
        self, forwarding: Forwarding, alerts: Sequence[Alert], located: LocatedHosts
    ) -> list[Answer]:
        """Where a peer does not answer, this daemon does, if it has ranks of the job too."""
        answers = await forwarding.pass_on(alerts, located) if alerts else []
        lost = [index for index, answer in enumerate(answers) if answer.outcome == PEER_FAILED]
        if lost:
            local = await self._ask_here([alerts[index] for index in lost], located.own)
            for index, answer in zip(lost, local, strict=True):
                answers[index] = answers[index] if answer.outcome == NO_RANK else answer
        return answers


def _document(answers: Sequence[Answer]) -> AlertAnswers:
    listed = [AlertAnswer.model_validate(answer) for answer in answers[:MAX_ANSWERS]]
    return AlertAnswers(alerts=listed, unlisted=max(0, len(answers) - MAX_ANSWERS))
