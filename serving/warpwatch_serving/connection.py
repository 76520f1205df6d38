"""HTTP/1.1 over accepted sockets, parsed by h11: peers, their limits, and their requests."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import h11
from starlette.responses import Response
from starlette.types import ASGIApp, Message

from warpwatch_devices.attribution.control_groups import read_owner
from warpwatch_devices.processes import overflow_uid
from warpwatch_serving.web_config import Tls
from warpwatch_telemetry.newest import NewestMap

logger = logging.getLogger(__name__)

# A client has to send the head of its first request in this time, and each part of a body.
HEAD_TIMEOUT_S = 10.0
# Between requests: longer than usual intervals of scrapes, so that each does not need a new one.
KEEP_ALIVE_S = 75.0
# A client that reads less than one part of an answer in this time gets no more of it.
WRITE_TIMEOUT_S = 10.0
PART_BYTES = 65536
MAX_HEAD_BYTES = 32768
# A client that still sends its request gets the answer before the connection is reset.
LINGER_S, LINGER_BYTES = 1.0, 2**20

# Far above what Prometheus, probes and some open pages send together from one address. A request
# beyond that waits, so that a flood costs little and nobody else's request is refused.
RATE_PER_S = 50.0
BURST = 200.0
PAUSE_S = 0.5
MAX_PEERS = 1024

MAX_CONNECTIONS = 128
# The rest is for root and the daemon's user on the Unix socket.
MAX_OF_OTHERS = 112
MAX_OF_PEER = 16

_BAD_REQUEST = b'{"error":{"reason":"bad_request","detail":"this is not an HTTP/1.1 request"}}\n'

_PROC = Path("/proc")
# struct ucred
_CREDENTIALS = struct.Struct("=iII")


class ClientGone(OSError):
    """Raised if an answer cannot be sent: the client has left or does not read."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The client that limits count by its name.

    uid: the user at the Unix socket, None if the kernel cannot name it, and over TCP. privileged:
    whether the user is root or the daemon's own. on_socket: whether it uses the Unix socket.
    """

    name: str
    uid: int | None = None
    privileged: bool = False
    on_socket: bool = False


def identify(accepted: socket.socket) -> Peer:
    """Return the peer of an accepted socket. Raises OSError if it has closed it already."""
    if accepted.family != socket.AF_UNIX:
        return Peer(network(accepted.getpeername()[0]))
    raw = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    # For a process of another user namespace the kernel reports the overflow UID. Root in a
    # container, or a user with the daemon's UID in one, is not that user of this machine.
    is_privileged = uid in (0, os.geteuid())
    if uid == overflow_uid() or (is_privileged and not _is_of_this_machine(pid)):
        return Peer("unknown user", on_socket=True)
    return Peer(f"uid {uid}", uid, is_privileged, on_socket=True)


def _is_of_this_machine(pid: int, proc: Path = _PROC) -> bool:
    """Return whether the process is visible, and in no pod or in the daemon's own."""
    theirs = read_owner(pid, "", proc) if pid > 0 else None
    ours = read_owner(os.getpid(), "", proc)
    return theirs is not None and theirs.pod_uid in ("", ours.pod_uid if ours else "")


def network(host: str) -> str:
    """Return the name under which limits count an address.

    One host owns a whole /64 of IPv6 addresses, and this machine all of 127.0.0.0/8.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return "loopback"
    return str(ipaddress.ip_network((address, 64 if address.version == 6 else 32), strict=False))


@dataclass(slots=True, eq=False)
class Slot:
    """A connection among others.

    waits_since: when the server began to wait for the client (time of the loop), else None.
    answering: a request has arrived and is not answered yet. is_ending: no other one is read.
    """

    peer: Peer
    waits_since: float | None = None
    answering: bool = False
    is_ending: bool = False

    async def wait(self, client: Awaitable[Any], timeout_s: float | None = None) -> Any:
        """Wait for the client. Raises TimeoutError."""
        self.waits_since = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout_s):
                return await client
        finally:
            self.waits_since = None


class HttpStream:
    """The requests of one connection, each answered before the next one is read."""

    def __init__(
        self, slot: Slot, app: ASGIApp, reader: StreamReader, writer: StreamWriter
    ) -> None:
        self._slot, self._app = slot, app
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._unsent: list[bytes] = []
        self._is_head = False

    async def serve(self, rates: PeerRates) -> None:
        """Answer requests. Raises OSError if the client leaves or breaks a time limit."""
        timeout_s = HEAD_TIMEOUT_S
        while await self._serve_request(timeout_s, rates):
            timeout_s = KEEP_ALIVE_S
        # To close a socket with unread data would reset the connection before the answer is read.
        if self._http.their_state not in (h11.DONE, h11.CLOSED, h11.MUST_CLOSE):
            if self._writer.can_write_eof():
                self._writer.write_eof()
            with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
                await self._slot.wait(self._reader.readexactly(LINGER_BYTES), LINGER_S)
        self._writer.close()
        await self._slot.wait(self._writer.wait_closed(), LINGER_S)

    async def _serve_request(self, timeout_s: float, rates: PeerRates) -> bool:
        """Return whether the connection can carry another request."""
        try:
            request = await self._slot.wait(self._next_event(), timeout_s)
            if not isinstance(request, h11.Request):
                return False
            if not rates.admits(self._slot.peer.name, asyncio.get_running_loop().time()):
                await self._slot.wait(asyncio.sleep(PAUSE_S))  # which another connection may end
            self._slot.answering = True
            self._is_head = request.method == b"HEAD"
            await self._app(self._scope(request), self._receive, self._send)
            self._slot.answering = False
        except h11.RemoteProtocolError as error:
            # Of the head: ``_receive`` takes an error of the body as the end of the request.
            status, headers = error.error_status_hint, {"connection": "close"}
            refusal = Response(_BAD_REQUEST, status, headers, "application/json")
            await refusal({"type": "http"}, self._receive, self._send)
            return False
        if self._slot.is_ending or {self._http.our_state, self._http.their_state} != {h11.DONE}:
            return False
        self._http.start_next_cycle()
        return True

    async def _next_event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(PART_BYTES))
        return event

    def _scope(self, request: h11.Request) -> dict[str, Any]:
        path, _, query = request.target.partition(b"?")
        server = self._writer.get_extra_info("sockname")
        is_tls = self._writer.get_extra_info("sslcontext") is not None
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": request.http_version.decode("ascii"),
            "method": request.method.decode("ascii"),
            "scheme": "https" if is_tls else "http",
            "path": unquote(path.decode("ascii")),
            "query_string": query,
            "headers": list(request.headers),
            "server": server[:2] if isinstance(server, tuple) else None,
            "state": {"peer": self._slot.peer},
        }

    async def _receive(self) -> Message:
        """Return the next part of the body. After its end the application may not wait."""
        if self._http.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[])
            await self._write([self._http.send(go_on) or b""])
        with contextlib.suppress(h11.RemoteProtocolError, OSError):
            event = await self._slot.wait(self._next_event(), HEAD_TIMEOUT_S)
            if isinstance(event, h11.Data):
                return {"type": "http.request", "body": bytes(event.data), "more_body": True}
            if isinstance(event, h11.EndOfMessage):
                return {"type": "http.request", "body": b"", "more_body": False}
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """Send a part of the answer. Raises ClientGone."""
        if message["type"] == "http.response.start":
            headers = [*message["headers"], (b"date", formatdate(usegmt=True).encode())]
            if not self._has_whole_request():
                headers.append((b"connection", b"close"))
            start = h11.Response(status_code=message["status"], headers=headers)
            self._unsent = self._http.send_with_data_passthrough(start) or []
            return
        body = memoryview(b"" if self._is_head else message.get("body", b""))
        for at in range(0, len(body), PART_BYTES):
            part = h11.Data(data=body[at : at + PART_BYTES])  # type: ignore[arg-type]
            await self._write(self._http.send_with_data_passthrough(part) or ())
        end = () if message.get("more_body") else self._http.send(h11.EndOfMessage())
        await self._write([end] if end else ())

    def _has_whole_request(self) -> bool:
        """Parse what has arrived of the request, and return whether that was all of it."""
        with contextlib.suppress(h11.RemoteProtocolError):
            while self._http.their_state is h11.SEND_BODY:
                if self._http.next_event() is h11.NEED_DATA:
                    return False
        return self._http.their_state is not h11.ERROR

    async def _write(self, parts: Iterable[bytes]) -> None:
        self._writer.writelines([*self._unsent, *parts])
        self._unsent = []
        try:
            await self._slot.wait(self._writer.drain(), WRITE_TIMEOUT_S)
        except OSError as error:
            raise ClientGone from error


class PeerRates(NewestMap[str, tuple[float, float]]):
    """By peer the requests that are left, BURST at first, and the time of the newest one."""

    def admits(self, peer: str, now: float) -> bool:
        """Take a request from what is left, which RATE_PER_S refills; False if it was none."""
        left, since = self.get(peer, (BURST, now))
        left = min(BURST, left + (now - since) * RATE_PER_S)
        self[peer] = (max(0.0, left - 1), now)
        return left >= 1


@dataclass(slots=True, eq=False)
class Connections:
    """The connections to an application, in the thread of their loop alone.

    tls: for all connections but those on the Unix socket. most_of_others, most_of_peer: how many
    there may be. If there are too many, the client that the server waits for longest loses its
    connection to the new one. If the server waits for none, the new one is closed.
    """

    app: ASGIApp
    tls: Tls | None = None
    most_of_others: int = MAX_OF_OTHERS
    most_of_peer: int = MAX_OF_PEER
    rates: PeerRates = field(default_factory=lambda: PeerRates(MAX_PEERS))
    tasks: dict[Slot, asyncio.Task[None]] = field(default_factory=dict)

    def serve(self, accepted: socket.socket, peer: Peer) -> None:
        """Serve an accepted socket in a task of its own, or close it if there is no slot."""
        if not self._has_slot(peer):
            accepted.close()
            return
        slot = Slot(peer)
        task = self.tasks[slot] = asyncio.create_task(self._serve(slot, accepted))
        task.add_done_callback(lambda _: self.tasks.pop(slot, None))
        task.add_done_callback(lambda _: accepted.close())  # also if it never began

    async def _serve(self, slot: Slot, accepted: socket.socket) -> None:
        try:
            reader, writer = await slot.wait(self._open(slot.peer, accepted), HEAD_TIMEOUT_S)
        except OSError:
            return
        try:
            await HttpStream(slot, self.app, reader, writer).serve(self.rates)
        except OSError:  # the client has left, or broke a time limit
            pass
        except Exception:
            logger.exception("a connection failed")
        finally:
            writer.transport.abort()

    async def _open(self, peer: Peer, accepted: socket.socket) -> tuple[StreamReader, StreamWriter]:
        loop = asyncio.get_running_loop()
        tls = None if peer.on_socket or self.tls is None else self.tls.context
        reader = StreamReader(PART_BYTES, loop)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=tls)
        # A write waits until all of it has left the process, so that its time limit counts. With 0,
        # asyncio's TLS would wait for an empty buffer to become smaller.
        transport.set_write_buffer_limits(high=1)
        return reader, StreamWriter(transport, protocol, reader, loop)

    def _has_slot(self, peer: Peer) -> bool:
        of_peer = [one for one in self.tasks if one.peer.name == peer.name]
        limit = MAX_CONNECTIONS if peer.privileged else self.most_of_others
        if len(of_peer) < self.most_of_peer and len(self.tasks) < limit:
            return True
        crowd = of_peer if len(of_peer) >= self.most_of_peer else self.tasks
        waiting = [(one.waits_since, one) for one in crowd if one.waits_since is not None]
        if not waiting:
            return False
        self.tasks.pop(min(waiting, key=lambda one: one[0])[1]).cancel()
        return True

    async def close(self, timeout_s: float) -> None:
        """End idle connections at once, and the others after their answer or ``timeout_s``."""
        for slot, task in self.tasks.items():
            slot.is_ending = True
            if not slot.answering:
                task.cancel()
        if self.tasks:
            _, late = await asyncio.wait(self.tasks.values(), timeout=timeout_s)
            for task in late:
                task.cancel()
