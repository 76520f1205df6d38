"""The sockets that a process listens on: a TCP address, a Unix socket, or one from systemd."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import MutableMapping
from pathlib import Path

from warpwatch_telemetry.errors import UsageError

# Every user may connect: the daemon sees which user it is.
FOLDER_MODE = 0o755
SOCKET_MODE = 0o666
BACKLOG = 128
# sd_listen_fds(3): systemd passes sockets from this descriptor on.
FIRST_PASSED_FD = 3
# Errors that pass by themselves: another process has the port, or the address is not up yet.
PASSING = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)


def listen_on(listen: str, key: str = "http.listen") -> socket.socket:
    """Listen on a TCP address. Raises UsageError, caused by an OSError, that names the key."""
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
            (str(address[0]), int(port)),
            family=family,
            backlog=BACKLOG,
            dualstack_ipv6=name == "::",
        )
    except OSError as error:
        raise UsageError(f"{key} {listen!r}: {_explain(error, port, key)}") from error
    return _prepared(listener)


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


def passed_by_systemd(environ: MutableMapping[str, str]) -> socket.socket | None:
    """Return the first TCP socket of the socket unit, if there is one; see sd_listen_fds(3).

    The variables are removed, so that no child process takes the descriptors for its own.
    """
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return None
    listeners = []
    for number in range(FIRST_PASSED_FD, FIRST_PASSED_FD + int(count)):
        os.set_inheritable(number, False)
        listener = socket.socket(fileno=number)
        if listener.family in (socket.AF_INET, socket.AF_INET6):
            listeners.append(listener)
    return _prepared(listeners[0]) if listeners else None


def _prepared(listener: socket.socket) -> socket.socket:
    # Connections inherit it: an answer may be two writes, and Nagle would delay the second.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener


def listen_locally(path: Path) -> socket.socket:
    """Listen on a Unix socket in a folder of this process's own. Raises OSError."""
    path.parent.mkdir(mode=FOLDER_MODE, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owner_uid = os.fstat(folder).st_uid
        if owner_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, f"{path.parent} belongs to another user")
        # A volume that the kubelet has mounted is root's, even if the daemon is not.
        if owner_uid == os.geteuid():
            os.fchmod(folder, FOLDER_MODE)
        # By the folder's descriptor: a socket's path may have 107 bytes at most.
        name = f"/proc/self/fd/{folder}/{path.name}"
        with socket.socket(socket.AF_UNIX) as other:
            if other.connect_ex(name) == 0:
                raise OSError(errno.EADDRINUSE, "another process serves it")
        # A process before this one left it.
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(name)
            path.chmod(SOCKET_MODE)
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return listener
    finally:
        os.close(folder)
