"""Writes Grafana annotations: a region for every anomaly and every capture, with a link.

An annotation is found again by its tags ``node:…`` and ``id:…``, which belong to one node. So none
is written twice after any failure, and nothing is kept on disk.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from warpwatch_exporters import links
from warpwatch_exporters.events import verdict_of
from warpwatch_runtime.http_requests import JSON, RequestError, Requests, read_secret
from warpwatch_runtime.pause import Pause
from warpwatch_telemetry.anomalies import Anomaly, sentence
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.state import State

logger = logging.getLogger(__name__)

PATH = "/api/annotations"


class StoredAnnotation(NamedTuple):
    """An annotation as Grafana has it. Times are wall clock in ms, equal without a region."""

    id: int
    time_ms: int
    end_ms: int


class GrafanaApi:
    """Grafana's annotations over HTTP.

    ``token_file`` is read for each request, so that a new token is used. ``ca_file`` signs the
    certificate; None means the authorities that the system trusts.
    """

    def __init__(self, url: str, token_file: Path | None, ca_file: Path | None = None) -> None:
        self._url = url.rstrip("/") + PATH
        self._token_file = token_file
        self._requests = Requests(ca_file)

    def find(self, tags: Sequence[str]) -> StoredAnnotation | None:
        """Return the annotation that has all of the tags."""
        query = [("type", "annotation"), ("limit", "1"), *(("tags", tag) for tag in tags)]
        found = self._send("GET", f"?{urlencode(query)}")
        try:
            return StoredAnnotation(*(int(found[0][key]) for key in ("id", "time", "timeEnd")))
        except IndexError:
            return None
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError("what answers is no Grafana") from error

    def create(self, annotation: Mapping[str, Any]) -> int:
        """Create an annotation; return its id."""
        created = self._send("POST", "", annotation)
        try:
            return int(created["id"])
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError("what answers is no Grafana") from error

    def update(self, ident: int, changes: Mapping[str, Any]) -> None:
        self._send("PATCH", f"/{ident}", changes)

    def _send(self, method: str, path: str, document: Mapping[str, Any] | None = None) -> Any:
        body = None if document is None else json.dumps(document).encode()
        token = {}
        if self._token_file is not None:
            token = {"Authorization": f"Bearer {read_secret(self._token_file)}"}
        answer = self._requests.send(method, self._url + path, body, JSON | token)
        if answer.status != 200:
            raise RequestError(
                f"{method} is answered with {answer.status}: {answer.words}", answer.status
            )
        try:
            return json.loads(answer.content)
        except (ValueError, RecursionError) as error:
            raise RequestError("what answers is no Grafana") from error


# After an outage of daemon or Grafana, the last hour is written, not the whole past.
LOOK_BACK_S = 3600.0
# The longest time of a round, so that the daemon can stop.
MAX_PER_ROUND = 20
LONGEST_PAUSE_S = 300.0
# Grafana keeps at most 100 characters of a tag's name and value, and 500 of all tags of one.
MAX_TAG_BYTES = 90
MAX_TEXT_CHARS = 500
# The outcomes of captures with a result.
_SHOWN = frozenset({"complete", "partial", "no_memory"})
# Refusals of a single annotation, which a repetition would not change.
_FINAL = frozenset({400, 413, 422})

# Labels of ``warpwatch_grafana_annotations_total``: written, end added, already there, refused
# (4xx), failed (repeated), and dropped before it could be written.
RESULTS = ("written", "updated", "known", "refused", "failed", "dropped")


@dataclass(frozen=True, slots=True)
class Annotation:
    """A wanted annotation. Times are wall clock in ms; ``end_ms`` is None while it lasts."""

    key: str
    time_ms: int
    end_ms: int | None
    tags: tuple[str, ...]
    text: str

    @property
    def own_tags(self) -> tuple[str, ...]:
        """The tags that no other annotation has: each node counts its own ids."""
        return (self.tags[0], *self.tags[-2:])


@dataclass(frozen=True, slots=True)
class _KnownAnnotation:
    """An annotation in Grafana; ``id`` is None if Grafana refused it for good."""

    id: int | None
    end_ms: int | None


class Annotations:
    """The wanted annotations of a state; ``public_url`` is the daemon's, for links."""

    def __init__(self, node: str, public_url: str) -> None:
        self._node = node
        self._url = public_url

    def of(self, state: State) -> Iterator[Annotation]:
        for anomaly in state.anomalies:
            yield self._anomaly(anomaly)
        for capture in state.captures:
            if capture.outcome in _SHOWN and capture.end_time is not None:
                yield self._capture(capture, capture.end_time)

    def _anomaly(self, anomaly: Anomaly) -> Annotation:
        about = _tags(job=anomaly.job, owner=anomaly.owner, rank=anomaly.rank)
        tags = ("warpwatch", anomaly.kind, anomaly.severity, *about)
        link = _link("anomaly", links.of_anomaly(self._url, anomaly.id))
        end_ms = None if anomaly.end_time is None else _ms(anomaly.end_time)
        text = _plain(sentence(anomaly, self._node)) + link
        return self._annotation(anomaly.id, _ms(anomaly.time), end_ms, tags, text)

    def _capture(self, capture: Capture, end_time: float) -> Annotation:
        request = capture.request
        link = _link("report", links.of_capture(self._url, capture))
        about = _tags(job=request.job, owner=request.owner)
        tags = ("warpwatch", "capture", request.kind, *about)
        begin_ms = _ms(capture.recording_time or capture.time)
        text = _plain(f"capture of {request.job}: {verdict_of(capture)}") + link
        return self._annotation(capture.id, begin_ms, _ms(end_time), tags, text)

    def _annotation(
        self, key: str, time_ms: int, end_ms: int | None, tags: tuple[str, ...], text: str
    ) -> Annotation:
        tags = (*tags, _tag("node", self._node), _tag("id", key))
        # Grafana would swap them.
        end_ms = None if end_ms is None else max(time_ms, end_ms)
        return Annotation(key, time_ms, end_ms, tags, text)


class GrafanaAnnotations:
    """Writes annotations; ``advance`` has a loop of its own, since it may wait.

    ``count`` gets each of RESULTS.
    """

    def __init__(
        self,
        api: GrafanaApi,
        annotations: Annotations,
        count: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._annotations = annotations
        self._count = count
        self._pause = Pause(monotonic, LONGEST_PAUSE_S)
        self._since_ms: int | None = None
        # The annotations of the state.
        self._known: dict[str, _KnownAnnotation] = {}
        self._waiting: set[str] = set()
        # How often each has failed, of those that wait.
        self._failures: dict[str, int] = {}
        self._complaint: int | str | None = None

    def advance(self, state: State) -> None:
        """Bring Grafana up to date with the state. May wait for it."""
        if self._since_ms is None:
            self._since_ms = _ms(state.time - LOOK_BACK_S)
        since_ms = self._since_ms
        wanted = {
            annotation.key: annotation
            for annotation in self._annotations.of(state)
            if max(annotation.time_ms, annotation.end_ms or 0) >= since_ms
        }
        self._forget(wanted)
        waiting = [one for one in wanted.values() if not self._is_there(one)]
        # A refused annotation does not delay the others.
        waiting.sort(key=lambda one: self._failures.get(one.key, 0))
        if self._pause.lasts:
            waiting = []
        for annotation in waiting[:MAX_PER_ROUND]:
            if not self._write(annotation):
                break

    def _forget(self, wanted: dict[str, Annotation]) -> None:
        # Annotations written in this round are kept.
        for _ in self._waiting - wanted.keys() - self._known.keys():
            self._count("dropped")
        self._known = {key: known for key, known in self._known.items() if key in wanted}
        self._failures = {key: count for key, count in self._failures.items() if key in wanted}
        self._waiting = wanted.keys() - self._known.keys()

    def _is_there(self, annotation: Annotation) -> bool:
        known = self._known.get(annotation.key)
        if known is None:
            return False
        # A region stays until the anomaly that came back ends again.
        return known.id is None or annotation.end_ms in (None, known.end_ms)

    def _write(self, annotation: Annotation) -> bool:
        """Write an annotation; return whether to continue with the next one."""
        try:
            result, ident = self._put(annotation)
        except RequestError as error:
            return self._failed(annotation, error)
        self._pause.reset()
        self._complaint = None
        self._count(result)
        self._known[annotation.key] = _KnownAnnotation(ident, annotation.end_ms)
        self._failures.pop(annotation.key, None)
        return True

    def _put(self, annotation: Annotation) -> tuple[str, int]:
        """Return the result and Grafana's id. Raises RequestError."""
        known = self._known.get(annotation.key)
        if known is not None and known.id is not None:
            self._end(known.id, annotation)
            return "updated", known.id
        found = self._api.find(annotation.own_tags)
        if found is None:
            return "written", self._api.create(_document(annotation))
        if annotation.end_ms in (None, found.end_ms):
            return "known", found.id
        self._end(found.id, annotation)
        return "updated", found.id

    def _end(self, ident: int, annotation: Annotation) -> None:
        self._api.update(ident, {"timeEnd": annotation.end_ms, "text": annotation.text})

    def _failed(self, annotation: Annotation, error: RequestError) -> bool:
        refused = error.status is not None and 400 <= error.status < 500
        self._count("refused" if refused else "failed")
        what: int | str = str(error) if error.status is None else error.status
        if what != self._complaint:
            self._complaint = what
            logger.warning("no annotation in Grafana: %s", error)
        gone = error.status == 404 and annotation.key in self._known
        if error.status in _FINAL or gone:
            self._known[annotation.key] = _KnownAnnotation(None, annotation.end_ms)
            return True
        self._failures[annotation.key] = self._failures.get(annotation.key, 0) + 1
        self._pause.begin()
        return False


def _document(annotation: Annotation) -> dict[str, Any]:
    document: dict[str, Any] = {
        "time": annotation.time_ms,
        "tags": list(annotation.tags),
        "text": annotation.text,
    }
    return document if annotation.end_ms is None else {**document, "timeEnd": annotation.end_ms}


def _link(name: str, url: str) -> str:
    return f' <a href="{escape(url)}" target="_blank">{name}</a>' if url else ""


def _plain(text: str) -> str:
    """Escape a text: Grafana shows annotations as HTML."""
    return escape(" ".join(text.split())[:MAX_TEXT_CHARS], quote=False)


def _tags(**about: object) -> Iterator[str]:
    """Yield a tag for each known fact."""
    return (_tag(name, str(value)) for name, value in about.items() if value not in (None, ""))


def _tag(name: str, value: str) -> str:
    cut = " ".join(value.split()).encode()[:MAX_TAG_BYTES].decode("utf-8", "ignore")
    return f"{name}:{cut.strip()}"


def _ms(time_s: float) -> int:
    return round(time_s * 1000)
