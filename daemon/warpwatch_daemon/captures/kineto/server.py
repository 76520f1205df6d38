"""The socket that stock PyTorch polls: one thread that sleeps until a message comes.

Everything that arrives is untrusted. Who sent it is what the kernel says (SCM_CREDENTIALS), and an
answer goes only to a socket in the folder that belongs to that user; it never waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import select
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from warpwatch import rendezvous
from warpwatch_daemon.captures.kineto import protocol
from warpwatch_daemon.captures.kineto.pollers import Pollers, Sender

# What libkineto binds in the same folder, with a UUID behind it.
CLIENT_PREFIX = "dynoconfigclient"
# A path of a socket has 107 bytes at most (sun_path), and the client's is the longest.
MAX_FOLDER_BYTES = 107 - len(f"/{CLIENT_PREFIX}") - 36
EVERYONE = 0o666
# From the socket's folder; only the daemon can make a file there.
NOWHERE = f"../{rendezvous.COMMANDS}/no-daemon"
# So many messages, then a pause of PAUSE_S: whoever floods the socket does not get the processor.
BATCH = 64
PAUSE_S = 0.02
TEND_INTERVAL_S = 1.0
# Sockets that dead processes left behind are removed.
SWEEP_INTERVAL_S = 60.0

_CLIENT = re.compile(rf"{CLIENT_PREFIX}[0-9A-Za-z-]{{1,48}}")
_CREDENTIALS = struct.Struct("iII")


class KinetoServer:
    """``serve`` is a loop of the supervisor's, ``stop`` may be called from any thread.

    Raises OSError where there can be no socket.
    """

    def __init__(self, folder: Path, pollers: Pollers, reject: Callable[[str], None]) -> None:
        self._folder = folder.absolute()
        self._pollers = pollers
        self._reject = reject
        self._tended_at = self._swept_at = 0.0
        self._stopped = False
        self._socket = self._open()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def _open(self) -> socket.socket:
        if len(os.fsencode(self._folder)) > MAX_FOLDER_BYTES:
            text = f"the path is longer than the {MAX_FOLDER_BYTES} bytes that libkineto can use"
            raise OSError(errno.ENAMETOOLONG, text)
        path = self._folder / rendezvous.KINETO_SOCKET
        # Of a daemon before this one: the folder is this daemon's alone.
        path.unlink(missing_ok=True)
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            opened.bind(str(path))
            path.chmod(EVERYONE)
        except OSError:
            opened.close()
            raise
        return opened

    def stop(self) -> None:
        self._stopped = True
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Leave a link to nowhere in the socket's place.

        libkineto gives up at once then; where none listens it tries again for seconds, which
        hold up the end of its process. And no other can take the place, as in an empty one.
        """
        self._socket.close()
        with contextlib.suppress(OSError):
            path = self._folder / rendezvous.KINETO_SOCKET
            path.unlink()
            path.symlink_to(NOWHERE)
        os.close(self._wake)

    # --- the loop ---

    def serve(self) -> None:
        """Wait for messages and answer them, at most BATCH; look after processes once a second."""
        if self._stopped:
            return
        idle_s = TEND_INTERVAL_S if self._pollers.names() else SWEEP_INTERVAL_S
        select.select([self._socket.fileno(), self._wake], [], [], idle_s)
        for _ in range(BATCH):
            if not self._answer_one():
                break
        at = time.monotonic()
        if at - self._tended_at >= TEND_INTERVAL_S:
            self._tended_at = at
            self._tend(at)

    def _answer_one(self) -> bool:
        """Whether there was a message."""
        try:
            # No room for anything but the credentials: descriptors that come along are dropped.
            data, ancillary, flags, address = self._socket.recvmsg(
                protocol.MAX_MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
            )
        except BlockingIOError:
            return False
        try:
            if flags & socket.MSG_TRUNC:
                raise protocol.MessageError("bad_message")
            sender = _sender(self._folder, ancillary, address)
            with self._reached(sender.name, sender.uid) as target:
                self._send(self._answer(data, sender), target)
        except protocol.MessageError as error:
            self._reject(error.reason)
        except OSError:
            # Dead, or its queue is full: it polls again if it can.
            self._reject("unreachable")
        return True

    def _send(self, data: bytes, target: str) -> None:
        """From a socket of its own, which no client can use up. Raises OSError, and never waits.

        What a client does not read stays charged to the socket that sent it. libkineto ends its
        process (!) when a message comes from a name outside its folder.
        """
        path = self._folder / f"{rendezvous.KINETO_SOCKET}-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sending:
            sending.bind(str(path))
            try:
                sending.sendto(data, target)
            finally:
                path.unlink()

    def _answer(self, data: bytes, sender: Sender) -> bytes:
        poll = protocol.parse(data)
        if poll is None:
            return protocol.registered(self._pollers.register(sender))
        text = self._pollers.poll(poll, sender, time.time(), time.monotonic())
        return protocol.configuration(text)

    @contextlib.contextmanager
    def _reached(self, name: str, uid: int | None = None) -> Iterator[str]:
        """An address of the client's socket that no link can divert. Raises MessageError."""
        try:
            fd = os.open(self._folder / name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise protocol.MessageError("no_address") from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISSOCK(found.st_mode) or uid not in (None, found.st_uid):
                raise protocol.MessageError("not_the_owner")
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    # --- housekeeping ---

    def _tend(self, at: float) -> None:
        for name in self._pollers.names():
            if not self._is_bound(name):
                self._pollers.forget(name)
                self._unlink(name)
        self._pollers.expire(at)
        if at - self._swept_at >= SWEEP_INTERVAL_S:
            self._swept_at = at
            self._sweep()

    def _sweep(self) -> None:
        with os.scandir(self._folder) as entries:
            names = [entry.name for entry in entries if _CLIENT.fullmatch(entry.name)]
        for name in names:
            if not self._is_bound(name):
                self._unlink(name)

    def _unlink(self, name: str) -> None:
        # Anyone may have put a folder there.
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()

    def _is_bound(self, name: str) -> bool:
        """Whether a living process has the socket, wherever its PID can be seen."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as asking:
            try:
                with self._reached(name) as target:
                    asking.connect(target)
            except (protocol.MessageError, ConnectionRefusedError):
                return False
            except OSError:
                # It may not be asked; polls that stop show it as well.
                return True
        return True


def _sender(folder: Path, ancillary: list[tuple[int, int, bytes]], address: object) -> Sender:
    path, _, name = address.rpartition("/") if isinstance(address, str) else ("", "", "")
    if not _CLIENT.fullmatch(name):
        raise protocol.MessageError("no_address")
    if path.rstrip("/") != str(folder):
        # It has the folder under another name, and an answer from this one would be its end.
        raise protocol.MessageError("other_path")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid, uid, _ = _CREDENTIALS.unpack_from(data)
            return Sender(name, pid, uid)
    raise protocol.MessageError("not_the_owner")
