"""Finds the node's pods by the folders that the kubelet keeps for their logs.

Before it starts a pod, the kubelet makes ``/var/log/pods/<namespace>_<pod>_<uid>``; it removes the
folder some time after the pod. Only root writes there, so the names are trusted, unlike claims of a
process. Only names are read.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path

from warpwatch_devices.attribution.origin import AttributionOrigin, OriginAnswer, OriginError
from warpwatch_telemetry.samples import Attribution, DeviceSample, Pod

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
