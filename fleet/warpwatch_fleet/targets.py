"""Finds the agents: from a list, files as Prometheus reads them, every address of a name."""

from __future__ import annotations

import functools
import glob
import logging
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warpwatch_fleet.config import ADDRESS, FleetConfig
from warpwatch_runtime.loading import read_yaml
from warpwatch_telemetry.errors import UsageError

logger = logging.getLogger(__name__)

# The label of a target that is one owner's own: it may speak for that owner alone.
OWNER = "owner"
# More than a headless service has addresses.
MAX_TARGETS = 8192

_ADDRESS = re.compile(ADDRESS)


@dataclass(frozen=True, slots=True)
class Target:
    """An agent to follow. address: host and port. labels: of its group in the file.

    server_name: the name in its certificate, if that is not the host of the address.
    node, partition: on the bus, its node, and the partition of the jobs in its lines there, None
    for the lines of the node itself.
    """

    address: str
    labels: Mapping[str, str] = field(default_factory=dict, compare=False)
    server_name: str | None = None
    node: str | None = None
    partition: int | None = None

    @property
    def owner(self) -> str | None:
        return self.labels.get(OWNER)


class Targets:
    """The targets of a fleet. ``read`` may wait for disks and the network.

    A file or name that cannot be read keeps its last targets, and is logged once.
    """

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._newest: dict[str, list[Target]] = {}
        self._failing: dict[str, str] = {}

    @property
    def failing(self) -> tuple[str, ...]:
        """The sources that cannot be read now, one line each."""
        return tuple(self._failing.values())

    def read(self) -> dict[str, Target]:
        """Return all targets by address. The first of duplicates counts."""
        found: dict[str, Target] = {}
        for target in self._all():
            found.setdefault(target.address, target)
            if len(found) == MAX_TARGETS:
                break
        return found

    def _all(self) -> Iterator[Target]:
        yield from (Target(address) for address in self._config.targets)
        files = [name for pattern in self._config.targets_files for name in _matching(pattern)]
        for name in files:
            yield from self._tried(name, functools.partial(_of_file, Path(name)))
        dns = self._config.targets_dns
        if dns is not None:
            yield from self._tried(dns, functools.partial(_of_name, dns))
        # A file that is gone takes its targets with it.
        for source in (self._newest.keys() | self._failing.keys()) - {*files, dns}:
            self._newest.pop(source, None)
            self._failing.pop(source, None)

    def _tried(self, source: str, read: Callable[[], list[Target]]) -> list[Target]:
        try:
            self._newest[source] = read()
            self._failing.pop(source, None)
        except (OSError, UsageError, UnicodeError) as error:
            text = str(error) if isinstance(error, UsageError) else f"{source}: {error}"
            if self._failing.get(source) != text:
                logger.warning("targets stay as they were: %s", text)
            self._failing[source] = text
        return self._newest.get(source, [])


def _matching(pattern: Path) -> list[str]:
    """Return the files of a pattern; only its last part may have a star, as in Prometheus."""
    if "*" not in pattern.name:
        return [str(pattern)]
    folder = glob.escape(str(pattern.parent))
    return sorted(glob.glob(f"{folder}/{pattern.name}"))


def _of_file(path: Path) -> list[Target]:
    """Read a file; one wrong group refuses it, as in Prometheus. Raises UsageError."""
    groups = read_yaml(path)
    if not isinstance(groups, list):
        raise UsageError(f'{path}: a list is needed, such as [{{"targets": ["gpu-1:9400"]}}]')
    return [target for group in groups for target in _of_group(path, group)]


def _of_group(path: Path, group: Any) -> Iterator[Target]:
    if not isinstance(group, dict) or group.keys() - {"targets", "labels"}:
        raise UsageError(f"{path}: a group has the keys targets and labels, and no other")
    targets, labels = group.get("targets") or [], group.get("labels") or {}
    if not isinstance(labels, dict) or not all(isinstance(one, str) for one in labels.values()):
        raise UsageError(f"{path}: labels: every label's value must be a text")
    if not isinstance(targets, list):
        raise UsageError(f"{path}: targets: a list is needed")
    for address in targets:
        if not isinstance(address, str) or not _ADDRESS.match(address):
            raise UsageError(f"{path}: {address!r} is not a target, such as gpu-1:9400")
        yield Target(address, labels)


def _of_name(name: str) -> list[Target]:
    """Return every address of host:port. Raises OSError."""
    host, _, port = name.rpartition(":")
    # A certificate has an IPv6 address without brackets.
    host = host.strip("[]")
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    addresses = sorted({str(address[0]) for *_, address in found})
    return [
        Target(f"[{one}]:{port}" if ":" in one else f"{one}:{port}", server_name=host)
        for one in addresses
    ]
