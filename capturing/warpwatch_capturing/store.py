"""The capture store: ``<store>/<YYYY>/<MM>/<DD>/<capture-id>/``, its files, and retention."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
import weakref
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlparse

import msgspec
from msgspec import Meta

from warpwatch.rendezvous import take_lock
from warpwatch_capturing.config import StoreConfig
from warpwatch_capturing.verification import UNREADABLE
from warpwatch_diagnosis.trace.files import reduction_name
from warpwatch_runtime import files
from warpwatch_runtime.directory import PRIVATE, make_parents
from warpwatch_telemetry import clean_text
from warpwatch_telemetry.captures import Capture, RankCapture
from warpwatch_telemetry.errors import UsageError

logger = logging.getLogger(__name__)

RECORD = "capture.json"
_FOLDERS = "[0-9]*/[0-9]*/[0-9]*/*"
SCHEMA = 1
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Store:
    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.path = store_path(config)
        try:
            # Traces hold source lines: other users read them through the API, which checks them.
            make_parents(self.path)
            self.path.mkdir(exist_ok=True)
            self.path.chmod(PRIVATE)
            probe = self.path / ".writable"
            files.write(probe, b"", durable=False)
            probe.unlink()
        except OSError as error:
            # A full store is not fatal: captures are refused until there is space again.
            if not self.path.is_dir() or not os.access(self.path, os.W_OK):
                raise UsageError(
                    f"cannot write captures to {self.path}: {error.strerror}; set store.url"
                ) from error
            logger.warning("the capture store %s: %s", self.path, error.strerror)
        lock_fd = self._lock()
        if lock_fd >= 0:
            weakref.finalize(self, os.close, lock_fd)

    def _lock(self) -> int:
        """Lock the store: a second daemon would take over this one's captures."""
        try:
            fd = os.open(self.path / ".lock", _LOCK, 0o600)
        except OSError:
            return -1
        if not take_lock(fd):
            os.close(fd)
            raise UsageError(f"{self.path} is another daemon's capture store; set store.url")
        return fd

    def folder(self, capture_id: str, now: float) -> Path:
        """Return the folder of a capture, which need not exist yet."""
        return self.path / time.strftime("%Y/%m/%d", time.gmtime(now)) / capture_id

    def create(self, capture: Capture) -> None:
        """Make the capture's folder with its capture.json. Raises OSError when there is no space.

        Retention then knows of it, whenever this daemon may be killed.
        """
        # Where the store's disk is no longer mounted, none is made in its place.
        os.stat(self.path)
        files.make_folders(self.path, Path(str(capture.folder)))
        self.save(capture)

    def save(self, capture: Capture) -> None:
        """Write capture.json in one go. Raises OSError when there is no space."""
        path = Path(str(capture.folder)) / RECORD
        content = {"schema": SCHEMA, **asdict(capture)}
        del content["folder"], content["diagnosis"]
        files.write(path, json.dumps(content, indent=1).encode())

    def load(self, with_diagnosis: int) -> list[Capture]:
        """Return the stored captures, oldest first; unreadable ones are ignored and logged.

        Only the newest ``with_diagnosis`` of them get their diagnosis: it takes memory.
        """
        found = []
        for path in sorted(self.path.glob(f"{_FOLDERS}/{RECORD}")):
            try:
                found.append(replace(parse(path.read_bytes()), folder=str(path.parent)))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                logger.warning("cannot read %s: %s", path, error)
        found.sort(key=lambda capture: capture.time)
        older, newest = found[:-with_diagnosis], found[-with_diagnosis:]
        return older + [replace(capture, diagnosis=diagnosis_of(capture)) for capture in newest]

    def folders(self) -> list[Path]:
        """Return all folders in the places of captures, with any content."""
        return [
            path for path in self.path.glob(_FOLDERS) if path.is_dir() and not path.is_symlink()
        ]

    def retain(
        self,
        captures: list[Capture],
        now: float,
        last: Collection[str] = (),
        folders: Collection[Path] = (),
    ) -> tuple[list[Capture], int]:
        """Remove captures that are too old or too many: (captures that stay, bytes of the store).

        ``last``: ids of captures that are removed after all others of their owner.
        ``folders``: the result of ``folders``, called before ``captures`` were read.
        """
        own = {Path(capture.folder) for capture in captures if capture.folder}
        stored = [orphan(path, now) for path in folders if path not in own]
        running: list[Stored] = []
        for capture in captures:
            size = size_of(Path(capture.folder)) if capture.folder else 0
            one = Stored(Path(str(capture.folder)), capture.time, size, capture)
            may_go = capture.outcome is not None and capture.folder is not None
            (stored if may_go else running).append(one)
        stays = running + keep(stored, running, last, self.config, now)
        kept = [one.capture for one in stays if one.capture is not None]
        return sorted(kept, key=lambda capture: capture.time), sum(one.size for one in stays)


def store_path(config: StoreConfig) -> Path:
    return Path(unquote(urlparse(config.url).path))


def parse(record: bytes) -> Capture:
    """Return the capture of a capture.json.

    Raises ValueError, KeyError, TypeError, AttributeError for an invalid one.
    """
    content = json.loads(record)
    if content.pop("schema") != SCHEMA:
        raise ValueError("another schema")
    # Fields of another version are ignored.
    return msgspec.convert(content, Capture)


# How long an empty folder without a record is kept.
EMPTY_AFTER_S = 3600.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A folder of the store; ``capture`` is ``None`` if a power cut has lost its record."""

    path: Path
    time: float
    size: int
    capture: Capture | None = None

    @property
    def owner(self) -> str:
        return "" if self.capture is None else self.capture.request.owner


def orphan(path: Path, now: float) -> Stored:
    try:
        changed = path.lstat().st_mtime
    except OSError:
        changed = now
    return Stored(path, min(changed, now), size_of(path))


def keep(
    stored: Sequence[Stored],
    running: Sequence[Stored],
    last: Collection[str],
    config: StoreConfig,
    now: float,
) -> list[Stored]:
    """Remove folders that are too old or too many; return the others. The largest owner is first.

    running: folders that stay, but count. last: ids of captures that are removed after all others
    of their owner, unless they are too old. The newest capture is removed after these. Captures
    that are in the remote store are removed first.
    """

    def is_old(one: Stored) -> bool:
        is_empty = one.capture is None and not one.size
        return now - one.time > (EMPTY_AFTER_S if is_empty else config.max_age)

    rest = [one for one in stored if not is_old(one) or not _removed(one)]
    used = sum(one.size for one in running)
    captured = [one for one in (*rest, *running) if one.capture is not None]
    newest = max(captured, key=lambda one: one.time, default=None)
    # The first of each owner goes first.
    owners: dict[str, list[Stored]] = defaultdict(list)
    for one in sorted(rest, key=lambda one: _precedence(one, last, newest)):
        owners[one.owner].append(one)
    kept: list[Stored] = []
    while owners:
        left = [one for of_owner in owners.values() for one in of_owner] + kept
        too_large = used + sum(one.size for one in left) > config.max_bytes
        if not too_large and len(running) + len(left) <= config.max_captures:
            return left
        most = max(
            owners.values(), key=lambda some: sum(one.size if too_large else 1 for one in some)
        )
        one = most.pop(0)
        if not most:
            del owners[one.owner]
        if (one is newest and not owners) or not _removed(one):
            kept.append(one)
    return kept


def size_of(folder: Path) -> int:
    """Return the bytes of all files in the folder, at any depth."""
    size = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(above, name)).st_size
    return size


def _precedence(
    one: Stored, last: Collection[str], newest: Stored | None
) -> tuple[bool, bool, bool, float]:
    is_last = one.capture is not None and one.capture.id in last
    is_only = one.capture is not None and one.capture.remote is None
    return (one is newest, is_last, is_only, one.time)


def _removed(stored: Stored) -> bool:
    shutil.rmtree(stored.path, ignore_errors=True)
    if stored.path.exists():
        return False
    logger.info("removed %s (%d bytes): retention", stored.path.name, stored.size)
    return True


# --- the files of a capture that its diagnosis reads ---

# The names of a baseline's reductions begin so, in a multi-node capture.
BASELINE = "baseline."


def is_usable(rank: RankCapture) -> bool:
    """Return whether the rank brought a file that can be read."""
    unreadable = any(problem.startswith(UNREADABLE) for problem in rank.problems)
    return rank.state == "written" and not unreadable


def unread(rank: RankCapture, why: str) -> RankCapture:
    """Return a rank whose file is there, but cannot be read."""
    problems = (*rank.problems, f"{UNREADABLE}: {why}")
    return replace(rank, detail=why, problems=problems, verified=False)


def usable_files(ranks: Sequence[RankCapture]) -> list[str]:
    """Return the main files of ranks that can be read."""
    return [rank.file for rank in ranks if rank.file and is_usable(rank)]


def nodes_of(ranks: Sequence[RankCapture]) -> dict[int, str]:
    """Return the node of each rank of a multi-node capture."""
    return {rank.rank: rank.node for rank in ranks if rank.node}


def reductions(capture: Capture) -> list[str]:
    """Return the files that the diagnosis of a multi-node capture reads."""
    wanted = map(reduction_name, usable_files(capture.ranks))
    return [name for name in wanted if name in capture.files]


def verified_files(ranks: Sequence[RankCapture]) -> list[str]:
    """Return the traces that other captures are compared with."""
    return [rank.file for rank in ranks if rank.file and rank.verified]


def missing_ranks(ranks: Sequence[RankCapture]) -> dict[int, str]:
    """Return why ranks have no file, by rank."""
    return {rank.rank: rank.detail for rank in ranks if not is_usable(rank)}


# --- diagnoses ---

# For a multi-node capture only the parts of a diagnosis are shown that do not grow with ranks.
_SHOWN = ("schema", "verdict", "summary", "findings", "collectives")


def diagnosis_of(capture: Capture) -> Mapping[str, Any] | None:
    """Return the diagnosis to show. Only the fleet has that of a multi-node capture."""
    if capture.of_fleet:
        return None
    found = read_diagnosis(Path(str(capture.folder)))
    if found is None or not nodes_of(capture.ranks):
        return found
    return {key: found[key] for key in _SHOWN if key in found}


# A diagnosis of a thousand ranks has a few megabytes.
MAX_DIAGNOSIS_BYTES = 32 * 2**20

_Amount = Annotated[float, Meta(ge=0, le=1e12)]


class _Roofline(msgspec.Struct):
    mfu_ratio: _Amount | None = None


class _Trace(msgspec.Struct):
    window_s: _Amount | None = None
    steps: Annotated[int, Meta(ge=0, le=2**40)] | None = None
    roofline: _Roofline | None = None


class _Finding(msgspec.Struct):
    kind: str
    share: _Amount | None = None
    advice: str | None = None


class _Diagnosis(msgspec.Struct):
    """The fields of a diagnosis that others read; the rest is only shown as JSON."""

    verdict: str
    summary: str | None = None
    findings: list[_Finding] = []
    traces: list[_Trace] = []


def read_diagnosis(folder: Path) -> Mapping[str, Any] | None:
    """Return ``diagnosis.json`` of a capture's folder, or None if there is no valid one."""
    try:
        with (folder / "diagnosis.json").open("rb") as file:
            content = file.read(MAX_DIAGNOSIS_BYTES + 1)
        if len(content) > MAX_DIAGNOSIS_BYTES:
            return None
        document: Mapping[str, Any] = clean_text.load(content)
        msgspec.convert(document, _Diagnosis)
    except (OSError, ValueError):
        return None
    return document
