"""Saves the state of each job in a file, so that a restart neither repeats nor forgets it.

Agents keep the lines of ten minutes: a younger state goes on seamlessly.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from warpwatch_detection.anomalies.snapshot import Snapshot
from warpwatch_runtime.files import StateFile
from warpwatch_runtime.log_output import Complaint
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.jobs import JobId

logger = logging.getLogger(__name__)

# Within what agents keep, twice over.
SAVE_INTERVAL_S = 240.0
# The state of a job that no agent has reported since is not restored.
KEPT_S = 86400.0
# 2,048 ranks take about 15 MB.
MAX_BYTES = 256 * 2**20


class SavedJob(msgspec.Struct, frozen=True):
    """names: the job's names on its nodes. left: anomalies that agents had opened before.

    time: the time up to which records are in the state.
    """

    id: JobId
    names: tuple[JobId, ...]
    detectors: Snapshot
    history: tuple[Anomaly, ...] = ()
    active: tuple[Anomaly, ...] = ()
    left: frozenset[str] = frozenset()
    time: float = 0.0


class JobStateStore:
    """Below ``folder``. Files that cannot be written or read are logged and skipped.

    fail: called for each job that cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        wall: Callable[[], float] = time.time,
        fail: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._fail = fail
        self._wall = wall
        self.complaint = Complaint(logger, logging.WARNING)
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._complain(f"fleet.state_dir {folder}: {error.strerror}")

    def load(self) -> dict[JobId, SavedJob]:
        """Return the saved jobs by their names on nodes."""
        found = (self._read(path) for path in sorted(self._folder.glob("*.job")))
        return {name: saved for saved in found if saved is not None for name in saved.names}

    def keep(self, saved: Iterable[SavedJob], forgotten: Iterable[JobId]) -> None:
        for job in saved:
            self._save(job)
        for ident in forgotten:
            with contextlib.suppress(OSError):
                self._path(ident).unlink()

    def _save(self, job: SavedJob) -> None:
        file = self._file(self._path(job.id))
        try:
            file.write(file.encode(job))
            self.complaint.clear()
        except OSError as error:
            self._fail()
            self._complain(f"cannot keep what is known of {job.id.name}: {error}")

    def _path(self, job: JobId) -> Path:
        name = "\0".join(job).encode(errors="replace")
        return self._folder / f"{hashlib.sha256(name).hexdigest()[:32]}.job"

    def _read(self, path: Path) -> SavedJob | None:
        with contextlib.suppress(OSError):
            if self._wall() - path.stat().st_mtime > KEPT_S:
                path.unlink()
        return self._file(path).read()

    def _file(self, path: Path) -> StateFile[SavedJob]:
        return StateFile(path, SavedJob, MAX_BYTES, is_packed=True)

    def _complain(self, why: str) -> None:
        self.complaint.make("a restart begins from what agents keep: %s", why)
