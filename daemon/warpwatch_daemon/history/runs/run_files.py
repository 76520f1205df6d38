"""Summaries of runs on disk: ``<store>/runs/<owner>/<job>/<run>.json``."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from urllib.parse import quote

import msgspec

from warpwatch_runtime import files
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.runs import SCHEMA, RunSummary

logger = logging.getLogger(__name__)

FOLDER = "runs"
# Of a segment of a path, in bytes.
MAX_SEGMENT = 128
# A summary of a run with 1,000 ranks and a histogram that is full.
MAX_BYTES = 256 << 10


def key_of(job: JobId) -> str:
    """Below ``runs/``, the same in the remote store."""
    return "/".join(map(_segment, job)) + ".json"


def _segment(text: str) -> str:
    """One name of a path: percent-encoded, and where that is too long, cut and told apart."""
    name = quote(text, safe="")
    if not name.strip("."):
        # No name of a path is empty, "." or "..".
        name = name.replace(".", "%2E") or "%00"
    if len(name) <= MAX_SEGMENT - len(".json"):
        return name
    return name[: MAX_SEGMENT - 16] + "-" + hashlib.sha256(text.encode()).hexdigest()[:10]


class RunFiles:
    def __init__(self, store: Path) -> None:
        self._store = store
        self._folder = store / FOLDER

    def load(self) -> list[RunSummary]:
        """Oldest first; what cannot be read is passed over and logged."""
        found = []
        for path in self._folder.glob("*/*/*.json"):
            try:
                with path.open("rb") as file:
                    summary = msgspec.json.decode(file.read(MAX_BYTES), type=RunSummary)
                if summary.schema == SCHEMA:
                    found.append(summary)
            except (OSError, msgspec.DecodeError) as error:
                logger.warning("cannot read %s: %s", path, error)
        return sorted(found, key=lambda summary: summary.first_time)

    def save(self, summary: RunSummary) -> None:
        """Raises OSError."""
        path = self._folder / key_of(summary.job_id)
        files.make_folders(self._store, path.parent)
        files.write(path, msgspec.json.encode(summary), durable=False)

    def remove(self, job: JobId) -> None:
        path = self._folder / key_of(job)
        path.unlink(missing_ok=True)
        for folder in (path.parent, path.parent.parent):
            try:
                folder.rmdir()
            except OSError:
                # Others of the job, or of the owner.
                return
