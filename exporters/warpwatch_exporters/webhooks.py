"""Sends a message for each anomaly, its end and the verdicts of its captures: JSON, or Slack."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from warpwatch_exporters.config import WebhookConfig
from warpwatch_exporters.events import StateEvent, anomaly_link, capture_link
from warpwatch_runtime.http_requests import JSON, RequestError, Requests, read_headers, read_secret
from warpwatch_runtime.supervisor import Pause
from warpwatch_telemetry.anomalies import SEVERITIES
from warpwatch_telemetry.newest import put_newest

logger = logging.getLogger(__name__)

# Beyond these the oldest are dropped.
MAX_WAITING = 100
# With the pauses between them, about ten minutes.
MAX_TRIES = 10
MAX_TEXT_CHARS = 1000
# Reported anomalies, whose captures are reported too.
MAX_REPORTED = 1000
# Labels of ``warpwatch_webhook_messages_total``: only failed messages are sent again.
RESULTS = ("sent", "failed", "refused", "dropped")

_SIGNS = {"info": ":information_source:", "warning": ":warning:", "critical": ":rotating_light:"}
_AGAIN = frozenset({408, 425, 429})


class WebhookExporter:
    """An exporter whose ``advance`` has a loop of its own, since it may wait.

    ``count`` gets each of RESULTS. name: its name in the log. node: its node; public_url: for
    links.
    """

    def __init__(
        self,
        config: WebhookConfig,
        name: str,
        node: str,
        public_url: str,
        count: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._name = name
        self._node = node
        self._public_url = public_url
        self._count = count
        self._requests = Requests(config.ca_file)
        self._pause = Pause(monotonic)
        self._waiting: deque[bytes] = deque()
        self._tries = 0  # of the first of them
        self._reported: dict[str, None] = {}

    def advance(self, events: Iterable[StateEvent]) -> None:
        for event in events:
            if self._is_wanted(event):
                self._waiting.append(self._body(event))
        while len(self._waiting) > MAX_WAITING:
            self._drop_first("dropped")
        while self._waiting and not self._pause.lasts:
            self._send_first()

    def _is_wanted(self, event: StateEvent) -> bool:
        anomaly, ident = event.anomaly, event.anomaly_id or ""
        if anomaly is None:
            return event.name == "verdict" and ident in self._reported
        if SEVERITIES.index(anomaly.severity) < SEVERITIES.index(self._config.min_severity):
            return False
        put_newest(self._reported, ident, None, MAX_REPORTED)
        return True

    def _send_first(self) -> None:
        """Send a message; it is removed once it was sent, refused, or tried MAX_TRIES times."""
        self._tries += 1
        try:
            self._post(self._waiting[0])
        except RequestError as error:
            status = error.status or 0
            refused = 300 <= status < 500 and status not in _AGAIN
            if self._pause.begin() or refused:
                logger.warning("%s: a message was refused or not delivered: %s", self._name, error)
            if refused:
                self._drop_first("refused")
                return
            self._count("failed")
            if self._tries >= MAX_TRIES:
                self._drop_first("dropped")
        else:
            self._pause.reset()
            self._drop_first("sent")

    def _drop_first(self, result: str) -> None:
        self._waiting.popleft()
        self._tries = 0
        self._count(result)

    def _post(self, body: bytes) -> None:
        """Send one message. Raises RequestError."""
        config = self._config
        url = read_secret(config.url_file) if config.url_file else str(config.url)
        if urlsplit(url).scheme not in ("http", "https"):
            raise RequestError(f"{config.url_file} has no http:// or https:// address")
        answer = self._requests.send("POST", url, body, JSON | read_headers(config.headers_file))
        if not 200 <= answer.status < 300:
            raise RequestError(f"the answer is {answer.status}: {answer.words}", answer.status)

    def _body(self, event: StateEvent) -> bytes:
        link = self._link(event)
        if self._config.format == "slack":
            return json.dumps({"text": _slack_text(event, link)}).encode()
        own = {"event": event.name, "time": event.time, "node": self._node, "url": link}
        summary = event.summary[:MAX_TEXT_CHARS]
        return json.dumps({"schema": 1, **own, "summary": summary, **event.facts}).encode()

    def _link(self, event: StateEvent) -> str | None:
        if event.capture is None:
            return anomaly_link(self._public_url, event.anomaly_id or "") or None
        return capture_link(self._public_url, event.capture) or None


def _slack_text(event: StateEvent, link: str | None) -> str:
    """Return the text; &, < and > are special there (docs.slack.dev, formatting-message-text)."""
    summary = " ".join(event.summary.split())[:MAX_TEXT_CHARS]
    for char, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        summary = summary.replace(char, escaped)
    anomaly = event.anomaly
    if anomaly is None:
        head = ":mag:"
    elif event.name == "anomaly_closed":
        how = ":link: explained:" if anomaly.explained_by else ":white_check_mark: over:"
        head = f"{how} *{anomaly.kind}*:"
    else:
        head = f"{_SIGNS[anomaly.severity]} *{anomaly.kind}*:"
    more = f" <{link}|{'report' if event.capture else 'more'}>" if link else ""
    return f"{head} {summary}{more}"
