"""Uploads finished captures into the remote store.

Each capture records whether it has been uploaded, so a restart goes on. A capture lies at
``captures/<YYYY>/<MM>/<DD>/<capture-id>/``, as in the local store. Its record, capture.json, is
written when it no longer changes, and manifest.json last: if that is there, all is there. Each try
writes the same bytes to the same keys. A node's part of a multi-node capture lies in
``nodes/<node>/`` of the fleet's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import msgspec

from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.remote_store import RemoteStore, RemoteStoreError
from warpwatch_capturing.store import RECORD
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.supervisor import Pause
from warpwatch_telemetry.captures import UPLOAD_OUTCOMES, Capture, remote_place

logger = logging.getLogger(__name__)

FOLDER = "captures"
MANIFEST = "manifest.json"
# Oldest first; but one that failed so often lets those behind it go first.
FAILURES_IN_FRONT = 5


class Manifest(msgspec.Struct, frozen=True):
    """The content of manifest.json, which is written last.

    node: the uploader; files: their sizes in bytes, by name; nodes: the nodes whose parts lie below
    it, each with a manifest of its own.
    """

    capture: str
    node: str
    files: dict[str, int]
    schema: int = 1
    nodes: tuple[str, ...] = ()


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
        if not self._is_settled(capture.id) or not (folder / RECORD).is_file():
            return
        record = (folder / RECORD).read_bytes()
        self._put(f"{key}/{RECORD}", record)
        nodes = tuple(sorted({rank.node for rank in capture.ranks if rank.node}))
        sizes = progress.sent | {RECORD: len(record)}
        manifest = Manifest(capture.id, self._node, sizes, nodes=nodes)
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
    """Return whether a capture with files has ended and is not uploaded yet."""
    outcome = capture.outcome
    ended = outcome is not None and not outcome.startswith("refused")
    brought = bool(capture.files) or not capture.of_fleet
    return ended and brought and capture.folder is not None and capture.remote is None
