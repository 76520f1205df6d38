"""The other end of a connection: a user of this machine, or a network address."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import HTTPConnection

from warpwatch_devices.attribution.control_groups import read_owner

_PROC = Path("/proc")
# struct ucred
_CREDENTIALS = struct.Struct("=iII")


@dataclass(frozen=True, slots=True)
class Peer:
    """The client that limits count by its name.

    uid: the user at the Unix socket, None over TCP or if the kernel cannot name it. privileged:
    whether that is root or the daemon's own user. on_socket: whether it uses the Unix socket.
    """

    name: str
    uid: int | None = None
    privileged: bool = False
    on_socket: bool = False


def peer_of(request: HTTPConnection) -> Peer:
    """Return the peer that the connection has left in the request's state."""
    found = request.scope.get("state", {}).get("peer")
    if isinstance(found, Peer):
        return found
    return Peer(network(request.client.host) if request.client else "")


def identify(accepted: socket.socket) -> Peer:
    """Return the peer of an accepted socket. Raises OSError if it has closed it already."""
    if accepted.family != socket.AF_UNIX:
        return Peer(network(accepted.getpeername()[0]))
    raw = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    # For a process of another user namespace the kernel reports the overflow UID. Root in a
    # container, or a user with the daemon's UID in one, is not that user of this machine.
    is_privileged = uid in (0, os.geteuid())
    if uid == _overflow_uid() or (is_privileged and not _is_of_this_machine(pid)):
        return Peer("unknown user", on_socket=True)
    return Peer(f"uid {uid}", uid, is_privileged, on_socket=True)


def _is_of_this_machine(pid: int, proc: Path = _PROC) -> bool:
    """Return whether the process is visible, and in no pod or in the daemon's own."""
    if pid <= 0:
        return False
    theirs, ours = read_owner(pid, "", proc), read_owner(os.getpid(), "", proc)
    if theirs is None:
        return False
    return not theirs.pod_uid or (ours is not None and theirs.pod_uid == ours.pod_uid)


def _overflow_uid() -> int:
    try:
        return int((_PROC / "sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def network(host: str) -> str:
    """Return the name under which limits count an address.

    One host owns a whole /64 of IPv6 addresses, and this machine all of 127.0.0.0/8.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return "loopback"
    return str(ipaddress.ip_network((address, 64 if address.version == 6 else 32), strict=False))
