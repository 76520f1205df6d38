"""A capture of the remote store, or of any place that obstore reads, fetched for a diagnosis."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from warpwatch_capturing import store, usable
from warpwatch_capturing.children import child
from warpwatch_capturing.remote.remote_store import RemoteStore, RemoteStoreError
from warpwatch_diagnosis.verdict.findings import Asked
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.errors import UsageError

# As the service names captures; where one lies follows from its name.
_NAME = re.compile(r"(\d{4})(\d\d)(\d\d)T\d{6}-[0-9a-f]+")
TRACES = (".json", ".json.gz")


@dataclass(frozen=True, slots=True)
class Fetched:
    """Files of this machine now. missing: the ranks that brought none, and why.

    baseline: what the daemon compared with, empty where it had none or it is not there any more.
    nodes: where the ranks of a capture over nodes ran. asked: the anomaly that the capture is of.
    """

    traces: Sequence[Path]
    missing: Mapping[int, str] = field(default_factory=dict)
    baseline: Sequence[Path] = ()
    nodes: Mapping[int, str] = field(default_factory=dict)
    asked: Asked | None = None


# Hears which file of how many is fetched now.
Reading = Callable[[int, int, str], None]


def fetch(
    address: str, folder: Path, reading: Reading = lambda number, count, name: None
) -> Fetched:
    """One trace, or all that the diagnosis of a capture reads, into an empty folder.

    Of a capture over nodes that is the reductions, which the fleet has read as well.

    Raises UsageError for what is neither, RemoteStoreError and OSError.
    """
    above, _, name = address.rstrip("/").rpartition("/")
    if name.endswith(TRACES):
        RemoteStore(above).fetch(name, folder / name)
        return Fetched([folder / name])
    capture, remote = _record(address), RemoteStore(address)
    if capture.request.kind != "torch":
        raise UsageError(f"{address} is a capture of kind {capture.request.kind}, without traces")
    known = child.asked(capture.request)
    asked = Asked(**known) if known else None
    nodes = usable.nodes(capture.ranks)
    if nodes:
        of_baseline = [name for name in capture.files if name.startswith(usable.BASELINE)]
        traces = _fetch(remote, usable.reductions(capture), folder, reading)
        well = _fetch(remote, of_baseline, folder, reading)
        return Fetched(traces, usable.missing(capture.ranks), well, nodes, asked)
    names = usable.files(capture.ranks)
    if not names:
        raise UsageError(f"{address} has no trace: {capture.detail or capture.outcome}")
    traces = _fetch(remote, names, folder, reading)
    baseline = _baseline(address, capture, folder, reading)
    return Fetched(traces, usable.missing(capture.ranks), baseline, asked=asked)


def _record(address: str) -> Capture:
    try:
        return store.parse(RemoteStore(address).read(store.RECORD))
    except RemoteStoreError as error:
        if not error.missing:
            raise
        raise UsageError(f"{address} is no capture, or not whole: no {store.RECORD}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        place = f"{address.rstrip('/')}/{store.RECORD}"
        raise UsageError(f"{place} is no record of a capture that can be read: {error}") from error


def _baseline(address: str, capture: Capture, folder: Path, reading: Reading) -> Sequence[Path]:
    place = _NAME.fullmatch(capture.baseline_id or "")
    if place is None:
        return ()
    # <store>/<YYYY>/<MM>/<DD>/<capture-id>
    above = address.rstrip("/").rsplit("/", 4)[0]
    address = "/".join([above, *place.groups(), place.string])
    baseline = folder / "baseline"
    try:
        names = usable.verified_files(_record(address).ranks)
        baseline.mkdir()
        return _fetch(RemoteStore(address), names, baseline, reading)
    except (UsageError, RemoteStoreError):
        return ()


def _fetch(remote: RemoteStore, names: Sequence[str], folder: Path, reading: Reading) -> list[Path]:
    paths = []
    for number, name in enumerate(names):
        reading(number, len(names), name)
        if PurePosixPath(name).name != name:
            raise UsageError(f"{remote.url}: {json.dumps(name)} is no name of a file")
        remote.fetch(name, folder / name)
        paths.append(folder / name)
    return paths
