"""The remote store, an object store: its client, fetched captures, and uploads of captures.

Objects are written and read by name only: nothing here lists or deletes. Credentials come from the
environment or the workload's identity, as for the provider's own tools.

Each capture records whether it has been uploaded, so a restart goes on. A capture lies at
``captures/<YYYY>/<MM>/<DD>/<capture-id>/``, as in the local store. Its record, capture.json, is
written when it no longer changes, and manifest.json last: if that is there, all is there. Each try
writes the same bytes to the same keys. A node's part of a multi-node capture lies in
``nodes/<node>/`` of the fleet's.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import msgspec

from warpwatch_capturing import child, store
from warpwatch_capturing.register import CaptureRegister
from warpwatch_diagnosis.findings import RequestingAnomaly
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.supervisor import Pause
from warpwatch_telemetry.captures import UPLOAD_OUTCOMES, Capture, remote_place
from warpwatch_telemetry.errors import UsageError, WarpwatchError

logger = logging.getLogger(__name__)

# S3 takes no smaller parts. With two uploads at once a put needs about 40 MB of memory, however
# large the file is.
PART_BYTES = 5 * 2**20
PARTS_AT_ONCE = 2
CONNECT_TIMEOUT_S = 10
# Enough to send two parts at once over a link of 170 kB/s.
REQUEST_TIMEOUT_S = 60
# Retries within one put. The uploader repeats a failed put much later.
RETRIES = 2
RETRY_TIMEOUT_S = 60
READ_BYTES = 2**20
# For records and summaries, which are read into memory.
MAX_DOCUMENT_BYTES = 16 * 2**20
_PROVIDERS = ("AWS", "GOOGLE", "AZURE")
_QUERY = re.compile(r"\?\S+")


class RemoteStoreError(WarpwatchError):
    """A failed request, in one line. ``missing``: the object or its bucket does not exist."""

    def __init__(self, text: str, *, missing: bool = False) -> None:
        super().__init__(text)
        self.missing = missing


class RemoteStore:
    """A client of the store. Its calls block, for minutes if the store does not reply.

    The process must not fork afterwards, except to run another program: obstore hangs in the child.
    """

    def __init__(self, url: str, environ: Mapping[str, str] = os.environ) -> None:
        """Open the store. Raises UsageError for an unusable address, and without obstore."""
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise UsageError(
                f"{url} needs obstore: install the extra warpwatch[remote] ({error})"
            ) from error
        self.url = url.rstrip("/")
        self._obstore: Any = obstore
        folder = {"mkdir": True} if url.startswith("file:") else {}
        try:
            self._store: Any = from_url(
                url, client_options=_client_options(environ), retry_config=_RETRY, **folder
            )
        except (obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise UsageError(f"{url}: {_line(error)}") from error

    def put(self, key: str, content: Path | bytes) -> None:
        """Write or replace an object. Raises RemoteStoreError."""
        with self._errors(key):
            self._obstore.put(
                self._store, key, content, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
            )

    def read(self, key: str) -> bytes:
        """Return a small document. Raises RemoteStoreError."""
        with self._errors(key):
            result = self._obstore.get(self._store, key)
            if result.meta["size"] > MAX_DOCUMENT_BYTES:
                raise RemoteStoreError(f"{self.url}/{key}: more than {MAX_DOCUMENT_BYTES} bytes")
            return bytes(result.bytes())

    def fetch(self, key: str, path: Path) -> None:
        """Write the object into a new file. Raises RemoteStoreError, and OSError of the file."""
        with self._errors(key):
            chunks = iter(self._obstore.get(self._store, key).stream(min_chunk_size=READ_BYTES))
        with path.open("xb") as file:
            while chunk := self._next(chunks, key):
                file.write(chunk)

    def _next(self, chunks: Iterator[bytes], key: str) -> bytes:
        with self._errors(key):
            return bytes(next(chunks, b""))

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise RemoteStoreError(f"{self.url}/{key}: {_line(error)}", missing=True) from error
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise RemoteStoreError(f"{self.url}/{key}: {_line(error)}") from error


_RETRY = {
    "max_retries": RETRIES,
    "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S),
    "backoff": {
        "init_backoff": timedelta(seconds=0.5),
        "max_backoff": timedelta(seconds=5),
        "base": 2,
    },
}


def _client_options(environ: Mapping[str, str]) -> dict[str, Any]:
    # If it gets options, obstore 0.12 no longer reads these variables itself.
    allowed = [environ.get(f"{name}_ALLOW_HTTP", "") for name in _PROVIDERS]
    return {
        "allow_http": any(value.lower() in ("1", "true", "yes", "on") for value in allowed),
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
    }


def _line(error: Exception) -> str:
    """Return an error's first line, without the queries of URLs, which may hold signatures."""
    return _QUERY.sub("", str(error).partition("\n")[0])[:300]


# The id of a capture, as ``capture_id.py`` makes it. Its date is the path in the store.
_NAME = re.compile(r"(\d{4})(\d\d)(\d\d)T\d{6}-[0-9a-f]+")
TRACES = (".json", ".json.gz")


@dataclass(frozen=True, slots=True)
class Fetched:
    """Local copies of a capture's files. missing: the reason, for each rank without a trace.

    baseline: the traces that the daemon compared with, if they still exist. nodes: the ranks'
    nodes in a multi-node capture. asked: the anomaly that requested the capture.
    """

    traces: Sequence[Path]
    missing: Mapping[int, str] = field(default_factory=dict)
    baseline: Sequence[Path] = ()
    nodes: Mapping[int, str] = field(default_factory=dict)
    asked: RequestingAnomaly | None = None


# Receives the number of the file that is fetched now, the number of all files, and its name.
Reading = Callable[[int, int, str], None]


def fetch(
    address: str, folder: Path, reading: Reading = lambda number, count, name: None
) -> Fetched:
    """Fetch one trace, or all files for the diagnosis of a capture, into an empty folder.

    For a multi-node capture these are the reductions (the ranks' measures without the trace), as in
    the fleet's own diagnosis. Raises UsageError if the address is neither a trace nor a capture
    with traces, RemoteStoreError and OSError.
    """
    parent, _, name = address.rstrip("/").rpartition("/")
    if name.endswith(TRACES):
        RemoteStore(parent).fetch(name, folder / name)
        return Fetched([folder / name])
    capture, remote = _record(address), RemoteStore(address)
    if capture.request.kind != "torch":
        raise UsageError(f"{address} is a capture of kind {capture.request.kind}, without traces")
    anomaly = child.asked(capture.request)
    asked = RequestingAnomaly(**anomaly) if anomaly else None
    nodes = store.nodes_of(capture.ranks)
    if nodes:
        of_baseline = [name for name in capture.files if name.startswith(store.BASELINE)]
        traces = _fetch(remote, store.reductions(capture), folder, reading)
        others = _fetch(remote, of_baseline, folder, reading)
        return Fetched(traces, store.missing_ranks(capture.ranks), others, nodes, asked)
    names = store.usable_files(capture.ranks)
    if not names:
        raise UsageError(f"{address} has no trace: {capture.detail or capture.outcome}")
    traces = _fetch(remote, names, folder, reading)
    baseline = _baseline(address, capture, folder, reading)
    return Fetched(traces, store.missing_ranks(capture.ranks), baseline, asked=asked)


def _record(address: str) -> Capture:
    try:
        return store.parse(RemoteStore(address).read(store.RECORD))
    except RemoteStoreError as error:
        if not error.missing:
            raise
        raise UsageError(
            f"{address} is not a capture, or is incomplete: it has no {store.RECORD}"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        place = f"{address.rstrip('/')}/{store.RECORD}"
        raise UsageError(f"{place} is not a readable record of a capture: {error}") from error


def _baseline(address: str, capture: Capture, folder: Path, reading: Reading) -> Sequence[Path]:
    """Fetch the traces of the baseline; return none if they can no longer be read."""
    place = _NAME.fullmatch(capture.baseline_id or "")
    if place is None:
        return ()
    # The address is <store>/<YYYY>/<MM>/<DD>/<capture-id>.
    root = address.rstrip("/").rsplit("/", 4)[0]
    address = "/".join([root, *place.groups(), place.string])
    baseline = folder / "baseline"
    try:
        names = store.verified_files(_record(address).ranks)
        baseline.mkdir()
        return _fetch(RemoteStore(address), names, baseline, reading)
    except (UsageError, RemoteStoreError):
        return ()


def _fetch(remote: RemoteStore, names: Sequence[str], folder: Path, reading: Reading) -> list[Path]:
    paths = []
    for number, name in enumerate(names):
        reading(number, len(names), name)
        if PurePosixPath(name).name != name:
            raise UsageError(f"{remote.url}: {json.dumps(name)} is not a file name")
        remote.fetch(name, folder / name)
        paths.append(folder / name)
    return paths


# --- uploads ---

FOLDER = "captures"
MANIFEST = "manifest.json"
# Oldest first; but one that failed so often lets those behind it go first.
FAILURES_IN_FRONT = 5


@dataclass(slots=True)
class _Progress:
    """sent: the size of each file that is there already, in bytes."""

    sent: dict[str, int] = field(default_factory=dict)
    failures: int = 0


class Uploads:
    """The uploads of captures. ``advance`` needs its own loop, as it waits for disk and network.

    base: the folder of the local store. is_settled: whether nothing more will be written of a
    capture that has ended.
    """

    def __init__(
        self,
        remote: RemoteStore,
        base: Path,
        captures: CaptureRegister,
        is_settled: Callable[[str], bool],
        metrics: AgentMetrics,
        node: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._remote = remote
        self._base = base
        self._captures = captures
        self._is_settled = is_settled
        self._node = node
        self._pause = Pause(monotonic)
        # All there from the start, so that an increase can be seen.
        outcomes = metrics.counter("uploads_total")
        self._outcomes = {
            outcome: outcomes.labels("capture", outcome) for outcome in UPLOAD_OUTCOMES
        }
        self._bytes = metrics.counter("upload_bytes_total")
        self._pending = metrics.gauge("uploads_pending").labels("capture")
        self._progress: dict[str, _Progress] = {}
        self._pending_captures()

    def advance(self) -> None:
        waiting = self._pending_captures()
        if self._pause.lasts:
            return
        for capture in waiting:
            try:
                self._upload(capture, self._progress[capture.id])
            except (RemoteStoreError, OSError) as error:
                self._failed(capture, error)
                break
            self._pause.reset()
        self._pending_captures()

    def _pending_captures(self) -> list[Capture]:
        """Return the captures to upload, in the order in which they are tried."""
        known = {capture.id: capture for capture in self._captures.all()}
        given_up = self._progress.keys() - known.keys()
        for capture_id in given_up:
            self._outcomes["given_up"].inc()
            logger.error("capture %s was removed before it was uploaded", capture_id)
        waiting = [capture for capture in known.values() if _is_pending(capture)]
        old = self._progress
        self._progress = {c.id: old.get(c.id) or _Progress() for c in waiting}
        self._pending.set(len(waiting))
        return sorted(waiting, key=self._turn)

    def _turn(self, capture: Capture) -> tuple[int, float]:
        return self._progress[capture.id].failures // FAILURES_IN_FRONT, capture.time

    def _upload(self, capture: Capture, progress: _Progress) -> None:
        """Upload the capture, but its record only when that no longer changes.

        Raises RemoteStoreError, and OSError of the local store.
        """
        folder = Path(str(capture.folder))
        key = f"{FOLDER}/{folder.relative_to(self._base).as_posix()}"
        if capture.of_fleet:
            key = f"{FOLDER}/{remote_place(capture.id)}/{node_folder(self._node)}"
        for name in capture.files:
            if name not in progress.sent and (folder / name).is_file():
                progress.sent[name] = self._put(f"{key}/{name}", folder / name)
        if not self._is_settled(capture.id) or not (folder / store.RECORD).is_file():
            return
        record = (folder / store.RECORD).read_bytes()
        self._put(f"{key}/{store.RECORD}", record)
        manifest = {
            "capture": capture.id,
            # The sizes in bytes.
            "files": progress.sent | {store.RECORD: len(record)},
            "node": self._node,
            # Their parts lie below this one, each with a manifest of its own.
            "nodes": sorted({rank.node for rank in capture.ranks if rank.node}),
            "schema": 1,
        }
        self._put(f"{key}/{MANIFEST}", msgspec.json.encode(manifest, order="sorted"))
        address = f"{self._remote.url}/{key}/"
        self._captures.update(capture.id, remote=address)
        self._outcomes["uploaded"].inc()
        logger.info("capture %s is at %s", capture.id, address)

    def _put(self, key: str, content: Path | bytes) -> int:
        """Upload one file; return its bytes. Raises RemoteStoreError, OSError."""
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        self._remote.put(key, content)
        self._bytes.inc(size)
        return size

    def _failed(self, capture: Capture, error: Exception) -> None:
        self._outcomes["failed"].inc()
        self._progress[capture.id].failures += 1
        if self._pause.begin():
            logger.error("cannot upload capture %s, trying again: %s", capture.id, error)


def node_folder(node: str) -> str:
    return f"nodes/{quote(node, safe='')}"


def _is_pending(capture: Capture) -> bool:
    outcome = capture.outcome
    ended = outcome is not None and not outcome.startswith("refused")
    brought = bool(capture.files) or not capture.of_fleet
    return ended and brought and capture.folder is not None and capture.remote is None
