"""The Unix socket beside the rendezvous folder: who asks there is known without a token."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from warpwatch import rendezvous

CONNECT_TIMEOUT_S = 2.0
# Where a daemon listens besides, if its configuration does not say otherwise.
DEFAULT_URL = "http://127.0.0.1:9400"


def socket_path(folder: Path) -> Path:
    """Of the daemon that serves this rendezvous folder; never in it, for pods mount that."""
    return folder.with_name(f"{folder.name}-api") / "api.sock"


def find_socket(environ: Mapping[str, str], uid: int) -> Path | None:
    """The socket of the daemon that trainings of this user find, where there is one.

    Only in a folder of root or of this user: no one else is to answer in the daemon's place.
    """
    paths = (socket_path(Path(folder.path)) for folder in rendezvous.candidates(environ, uid))
    return next((path for path in paths if _is_served(path, uid)), None)


def connect(path: Path, timeout_s: float | None) -> socket.socket:
    """Raises OSError."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        # By the folder's descriptor: a socket's path may have 107 bytes at most.
        connection.connect(f"/proc/self/fd/{folder}/{path.name}")
    except OSError:
        connection.close()
        raise
    finally:
        os.close(folder)
    return connection


def _is_served(path: Path, uid: int) -> bool:
    try:
        if path.parent.lstat().st_uid not in (0, uid):
            return False
        connect(path, CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
