"""``POST /api/v1/alertmanager``: alerts that fire ask for captures."""

from __future__ import annotations

from collections import Counter
from functools import partial

import anyio.to_thread
from anyio import CapacityLimiter
from starlette.requests import Request
from starlette.responses import Response

from warpwatch_serving.access import Access
from warpwatch_serving.answers import HttpError, json_answer
from warpwatch_serving.backend import ApiBackend
from warpwatch_serving.bodies import AlertmanagerPayload, json_body
from warpwatch_serving.models import AlertAnswers
from warpwatch_telemetry.alerts import NotReadyError, plain

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

    def __init__(self, backend: ApiBackend, access: Access) -> None:
        self._backend = backend
        self._access = access
        self._workers: CapacityLimiter | None = None
        self._busy = 0

    async def receive(self, request: Request) -> Response:
        """Alerts that fire ask for captures."""
        if not self._access.check_change(request).all_jobs:
            raise HttpError(403, "not_root", "alerts ask for everybody's jobs: only root may")
        if self._busy >= MAX_AT_ONCE:
            raise HttpError(503, "busy", "too many webhooks are being answered", _RETRY)
        self._busy += 1
        try:
            return await self._answer(request)
        except NotReadyError as error:
            raise HttpError(503, "starting", str(error), _RETRY) from error
        finally:
            self._busy -= 1

    async def _answer(self, request: Request) -> Response:
        alerts = (await json_body(request, AlertmanagerPayload)).alerts
        own = plain(str((request.scope.get("server") or ("",))[0]))
        if self._workers is None:
            self._workers = CapacityLimiter(WORKERS)
        # It waits for the capture that is being begun: off the thread that serves.
        work = partial(self._backend.receive_alerts, alerts, own)
        answers = await anyio.to_thread.run_sync(work, limiter=self._workers)
        received = self._backend.metrics.counter("alerts_received_total")
        for outcome, count in Counter(answer.outcome for answer in answers).items():
            received.labels(outcome).inc(count)
        listed, unlisted = answers[:MAX_ANSWERS], max(0, len(answers) - MAX_ANSWERS)
        return json_answer(AlertAnswers(alerts=list(listed), unlisted=unlisted))
