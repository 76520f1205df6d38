"""Reads the jobs that a prolog writes to a folder: a file per device, a line per job.

A line has the job's id and what is known of it: ``4711 user=ann account=vision partition=a3``.

A file is named by the device's UUID, or by its index on the node (``3``; a MIG instance ``3.7``
with its GPU instance). The index is the driver's, as in SLURM_JOB_GPUS. A job's own numbers
(CUDA_VISIBLE_DEVICES) name other GPUs unless the job holds the first one.

Others than root may write to the folder, so its files are untrusted: they are bounded, links are
not followed, and an invalid line refuses the file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from warpwatch_devices.attribution.origin import AttributionOrigin, OriginAnswer, OriginError
from warpwatch_telemetry.samples import Attribution, Device, DeviceSample, SlurmJob

MAX_FILE_BYTES = 4096
MAX_JOBS = 64
# Array tasks (12_3), parts of heterogeneous jobs (12+1), ids of other batch systems (12.server).
SLURM_WORD = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.@+-]{0,63}", re.ASCII)
_ABOUT = frozenset(SlurmJob._fields) - {"id"}
_JOB_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.+\[\]-]{0,63}", re.ASCII)


class FileRefused(Exception):
    """Raised for an invalid job file."""


class SlurmFolderOrigin(AttributionOrigin):
    name = "slurm"
    needs_devices = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, samples: Iterable[DeviceSample], now: float) -> OriginAnswer:
        """Read the files of known devices only, so that a full folder costs nothing."""
        try:
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise OriginError(f"{self._folder}: {error.strerror}") from error
        jobs: dict[str, tuple[SlurmJob, ...]] = {}
        refused: set[str] = set()
        try:
            for sample in samples:
                found = _jobs_of(sample.device, descriptor, refused)
                if found:
                    jobs[sample.device.uuid] = tuple(sorted(found))
        finally:
            os.close(descriptor)
        return OriginAnswer((Attribution(self.name, now, slurm_jobs=jobs),), frozenset(refused))


def _jobs_of(device: Device, folder: int, refused: set[str]) -> set[SlurmJob]:
    place = f"{device.index}.{device.gpu_instance}" if device.gpu_instance else f"{device.index}"
    found: set[SlurmJob] = set()
    for name in (device.uuid, place):
        # Before R470 the UUID of a MIG instance had slashes in it.
        if not name or "/" in name:
            continue
        try:
            found |= _read_jobs(name, folder)
        except FileRefused as error:
            refused.add(f"{name}: {error}")
    return found


def _read_jobs(name: str, folder: int) -> set[SlurmJob]:
    """Return the jobs in a file; a missing file has none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise FileRefused(error.strerror) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileRefused("no regular file")
        text = os.read(descriptor, MAX_FILE_BYTES + 1)
    except OSError as error:
        raise FileRefused(error.strerror) from error
    finally:
        os.close(descriptor)
    return parse_jobs(text)


def parse_jobs(text: bytes) -> set[SlurmJob]:
    """Return one job per line. Raises FileRefused if any line is invalid."""
    if len(text) > MAX_FILE_BYTES:
        raise FileRefused(f"more than {MAX_FILE_BYTES} bytes")
    lines = {line.strip() for line in text.decode("ascii", "replace").splitlines()} - {""}
    if len(lines) > MAX_JOBS:
        raise FileRefused(f"more than {MAX_JOBS} jobs")
    return {_parse_job(line) for line in lines}


def _parse_job(line: str) -> SlurmJob:
    job, *about = line.split()
    words = [word.partition("=")[::2] for word in about]
    known = all(name in _ABOUT and SLURM_WORD.fullmatch(value) for name, value in words)
    if not _JOB_ID.fullmatch(job) or not known:
        raise FileRefused("holds something else than jobs")
    return SlurmJob(job, **dict(words))
