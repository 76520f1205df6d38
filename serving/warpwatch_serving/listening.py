"""The sockets that are listened on: an address, and the Unix socket."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from warpwatch_telemetry.errors import UsageError

# Of the folder and the socket in it: everybody may ask, and the daemon sees who it is.
FOLDER_MODE = 0o755
SOCKET_MODE = 0o666


def listen_on(listen: str, key: str = "http.listen") -> socket.socket:
    """Raises UsageError that names the key."""
    host, _, port = listen.rpartition(":")
    if int(port) > 65535:
        raise UsageError(f"{key} {listen!r}: a port is at most 65535")
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    name = host.strip("[]") or everywhere
    try:
        found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        # localhost may be both; IPv4 sorts first.
        family, _, _, _, address = min(found, key=lambda info: info[0])
        listener = socket.create_server(
            (str(address[0]), int(port)), family=family, dualstack_ipv6=name == "::"
        )
        # Inherited by connections: head and body are two writes, and Nagle would hold the second.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise UsageError(f"{key} {listen!r}: {_explain(error, port, key)}") from error


def _explain(error: OSError, port: str, key: str) -> str:
    if error.errno == errno.EADDRINUSE:
        variable = f"WARPWATCH_{key.upper().replace('.', '__')}"
        who = "; 9400 is also dcgm-exporter's own" if port == "9400" else ""
        return (
            f"the port is taken by another process{who}; "
            f"set {key} ({variable}) to a free one, e.g. 127.0.0.1:9401"
        )
    if error.errno == errno.EACCES:
        return "this port needs privileges; take one above 1023"
    return f"{error.strerror or error}; name an address of this machine, e.g. 127.0.0.1:9400"


def listen_locally(path: Path) -> socket.socket:
    """A Unix socket in a folder of its own, the daemon's alone. Raises OSError."""
    path.parent.mkdir(mode=FOLDER_MODE, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owner_uid = os.fstat(folder).st_uid
        if owner_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, f"{path.parent} belongs to another user")
        # A volume that the kubelet has mounted is root's, whoever the daemon is.
        if owner_uid == os.geteuid():
            os.fchmod(folder, FOLDER_MODE)
        # Of a daemon before this one: the folder is this daemon's alone.
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # By the folder's descriptor: a socket's path may have 107 bytes at most.
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")
            path.chmod(SOCKET_MODE)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        return listener
    finally:
        os.close(folder)
