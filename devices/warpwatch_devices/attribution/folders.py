"""Origins that are folders: the kubelet's, of the pods' logs, and a prolog's, of job ids.

Before it starts a pod, the kubelet makes ``/var/log/pods/<namespace>_<pod>_<uid>``; it removes the
folder some time after the pod. Only root writes there, so the names are trusted, unlike claims of a
process. Only names are read.

A prolog of Slurm writes a file per device with a line per job: the job's id and what is known of
it, ``4711 user=ann account=vision partition=a3``. A file is named by the device's UUID, or by its
index on the node (``3``; a MIG instance ``3.7`` with its GPU instance). The index is the driver's,
as in SLURM_JOB_GPUS. A job's own numbers (CUDA_VISIBLE_DEVICES) name other GPUs unless the job
holds the first one. Others than root may write there, so these files are untrusted: they are
bounded, links are not followed, and an invalid line refuses the file.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from warpwatch_devices.source import AttributionOrigin, OriginAnswer, OriginError
from warpwatch_telemetry.samples import Attribution, Device, DeviceSample, Pod, SlurmJob

DEFAULT_FOLDER = Path("/var/log/pods")
# A kubelet runs 110 pods unless it is configured otherwise, and keeps some that have ended.
MAX_PODS = 16_384

# A DNS label, a DNS subdomain, and a UID as the API server makes it or the kubelet for static pods.
_NAME = re.compile(
    r"(?P<namespace>[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)"
    r"_(?P<pod>[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)"
    r"_(?P<uid>[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})"
)


def folder_of(said: str) -> Path | None:
    """Return the folder that ``attribution.pod_logs`` means, or None for none."""
    if said != "auto":
        return None if said == "off" else Path(said)
    try:
        return DEFAULT_FOLDER if os.listdir(DEFAULT_FOLDER) else None
    except OSError:
        return None


class PodFoldersOrigin(AttributionOrigin):
    name = "pod_logs"
    needs_devices = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, samples: Iterable[DeviceSample], now: float) -> OriginAnswer:
        try:
            pods = self._pods()
        except OSError as error:
            raise OriginError(f"{self._folder}: {error.strerror}") from error
        if not pods:
            # Where a kubelet runs there is a pod, if only the daemon's own.
            raise OriginError(f"{self._folder}: no pod has a folder there")
        return OriginAnswer((Attribution(self.name, now, pods=pods),))

    def _pods(self) -> dict[str, Pod]:
        """Return the pods by UID. Raises OSError, and OriginError if they are too many."""
        with os.scandir(self._folder) as entries:
            listed = list(itertools.islice(entries, MAX_PODS + 1))
        if len(listed) > MAX_PODS:
            raise OriginError(f"{self._folder} has more than {MAX_PODS} folders")
        found = {}
        for entry in listed:
            name = _NAME.fullmatch(entry.name)
            if name and entry.is_dir(follow_symlinks=False):
                found[name["uid"]] = Pod(name["namespace"], name["pod"])
        return found


MAX_FILE_BYTES = 4096
MAX_JOBS = 64
# Array tasks (12_3), parts of heterogeneous jobs (12+1), ids of other batch systems (12.server).
# A user of a Windows domain is ``DOM\ann``.
SLURM_WORD = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.@\\+-]{0,63}", re.ASCII)
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
    # A cluster without accounting has no account.
    known = all(
        name in _ABOUT and (not value or SLURM_WORD.fullmatch(value)) for name, value in words
    )
    if not _JOB_ID.fullmatch(job) or not known:
        raise FileRefused("holds something else than jobs")
    return SlurmJob(job, **dict(words))
