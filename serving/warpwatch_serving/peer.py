"""Who is at the other end of a connection, as the kernel and the address say."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import HTTPConnection

from warpwatch_devices.attribution.control_groups import read_owner
from warpwatch_serving.socket_owner import owner

_PROC = Path("/proc")
# struct ucred
_CREDENTIALS = struct.Struct("=iII")


@dataclass(frozen=True, slots=True)
class Peer:
    """name: whom limits count, a user of this machine or a network address.

    uid: of this machine's user, None where there is none or it is not known. privileged: root or
    the daemon's own user. on_socket: it came through the Unix socket.
    """

    name: str
    uid: int | None = None
    privileged: bool = False
    on_socket: bool = False


def peer_of(request: HTTPConnection) -> Peer:
    """As the connection has left it."""
    found = request.scope.get("state", {}).get("peer")
    if isinstance(found, Peer):
        return found
    return Peer(network(request.client.host) if request.client else "")


def identify(transport: Any) -> Peer:
    """The peer of a connection that has just been made."""
    connection = transport.get_extra_info("socket")
    if connection.family == socket.AF_UNIX:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return _on_socket(pid, uid)
    client = transport.get_extra_info("peername") or ("", 0)
    if not is_loopback(client[0]):
        return Peer(network(client[0]))
    server = transport.get_extra_info("sockname")
    try:
        uid = owner(client[:2], server[:2])
    except (OSError, ValueError):
        uid = None
    if uid is None or uid == _overflow_uid():
        return Peer("unknown user")
    return Peer(f"uid {uid}", uid, privileged=uid in (0, os.geteuid()))


def _on_socket(pid: int, uid: int) -> Peer:
    """Of a process in another user namespace the kernel says the overflow UID, which is no user's.

    Root, or who has the daemon's UID, in a container is not the one of this machine.
    """
    if uid == _overflow_uid():
        return Peer("unknown user", on_socket=True)
    if uid not in (0, os.geteuid()):
        return Peer(f"uid {uid}", uid, on_socket=True)
    if not _is_of_this_machine(pid):
        return Peer("unknown user", on_socket=True)
    return Peer(f"uid {uid}", uid, privileged=True, on_socket=True)


def _is_of_this_machine(pid: int, proc: Path = _PROC) -> bool:
    """Whether the process can be seen, and is in no pod, or in the daemon's own."""
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


def is_loopback(host: str) -> bool:
    """Whether a host, by name or address, is this machine. Names are not looked up."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def network(host: str) -> str:
    """One host owns a whole /64 of IPv6 addresses, so they count as one."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host
