"""HTTP/1.1 over one accepted socket: h11 parses requests, an ASGI application answers them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import h11
from starlette.types import ASGIApp, Message

from warpwatch_serving.access import Peer
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

T = TypeVar("T")


class ClientGone(OSError):
    """Raised if an answer cannot be sent: the client has left or does not read."""


class Service(NamedTuple):
    """An application and the TLS context under which it is served, None for plain HTTP."""

    app: ASGIApp
    tls: ssl.SSLContext | None = None


@dataclass(slots=True, eq=False)
class Place:
    """A connection among others.

    waits_since: the time of the loop when the server began to wait for the client, None while the
    client waits for the server. answering: whether a request has arrived and is not answered yet.
    """

    peer: Peer
    waits_since: float | None = None
    answering: bool = False

    async def wait(self, client: Awaitable[T], timeout_s: float | None = None) -> T:
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
        self,
        place: Place,
        service: Service,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._place = place
        self._service = service
        self._reader = reader
        self._writer = writer
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
            with contextlib.suppress(TimeoutError):
                await self._place.wait(self._discard(), LINGER_S)
        self._writer.close()
        await self._place.wait(self._writer.wait_closed(), LINGER_S)

    # --- one request ---

    async def _serve_request(self, timeout_s: float, rates: PeerRates) -> bool:
        """Return whether the connection can carry another request."""
        try:
            request = await self._place.wait(self._next_request(), timeout_s)
            if request is None:
                return False
            if not rates.admits(self._place.peer.name, asyncio.get_running_loop().time()):
                # A new connection of the peer may end this wait.
                await self._place.wait(asyncio.sleep(PAUSE_S))
            self._place.answering = True
            self._is_head = request.method == b"HEAD"
            await self._service.app(self._scope(request), self._receive, self._send)
            self._place.answering = False
        except h11.RemoteProtocolError as error:
            await self._refuse(error.error_status_hint)
            return False
        if {self._http.our_state, self._http.their_state} != {h11.DONE}:
            return False
        self._http.start_next_cycle()
        return True

    async def _next_request(self) -> h11.Request | None:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(PART_BYTES))
        return event if isinstance(event, h11.Request) else None

    def _scope(self, request: h11.Request) -> dict[str, Any]:
        path, _, query = request.target.partition(b"?")
        server = self._writer.get_extra_info("sockname")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": request.http_version.decode("ascii"),
            "method": request.method.decode("ascii"),
            "scheme": "http" if self._service.tls is None else "https",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": list(request.headers),
            "client": (self._place.peer.name, 0),
            "server": server[:2] if isinstance(server, tuple) else None,
            "state": {"peer": self._place.peer},
        }

    async def _receive(self) -> Message:
        """Return the next part of the body. After its end the application may not wait."""
        if self._http.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[])
            await self._write([self._http.send(go_on) or b""])
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                reading = self._reader.read(PART_BYTES)
                self._http.receive_data(await self._place.wait(reading, HEAD_TIMEOUT_S))
        except (h11.RemoteProtocolError, OSError):
            return {"type": "http.disconnect"}
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

    async def _refuse(self, status: int) -> None:
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", b"%d" % len(_BAD_REQUEST)))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": _BAD_REQUEST})

    async def _write(self, parts: Iterable[bytes]) -> None:
        self._writer.writelines([*self._unsent, *parts])
        self._unsent = []
        try:
            await self._place.wait(self._writer.drain(), WRITE_TIMEOUT_S)
        except OSError as error:
            raise ClientGone from error

    async def _discard(self) -> None:
        left = LINGER_BYTES
        while left > 0 and (data := await self._reader.read(PART_BYTES)):
            left -= len(data)


class PeerRates:
    """A bucket of requests for each peer: BURST at once, refilled with RATE_PER_S.

    Beyond MAX_PEERS, the peer that was silent for longest is forgotten.
    """

    def __init__(self) -> None:
        # The requests that are left, and the time of the newest one.
        self._buckets: NewestMap[str, tuple[float, float]] = NewestMap(MAX_PEERS)

    def admits(self, peer: str, now: float) -> bool:
        """Take a request from the peer's bucket; False if none was left."""
        left, since = self._buckets.get(peer, (BURST, now))
        left = min(BURST, left + (now - since) * RATE_PER_S)
        self._buckets[peer] = (max(0.0, left - 1), now)
        return left >= 1


class Connections:
    """The connections that are served, in the thread of their loop alone.

    If there are too many, in all or of one peer, the client that the server waits for longest
    loses its connection to the new one. If the server waits for none, the new one is closed.
    """

    def __init__(
        self, most_of_others: int = MAX_OF_OTHERS, most_of_peer: int = MAX_OF_PEER
    ) -> None:
        self._most_of_others = most_of_others
        self._most_of_peer = most_of_peer
        self._rates = PeerRates()
        self._tasks: dict[Place, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def serve(self, accepted: socket.socket, peer: Peer, service: Service) -> None:
        """Serve an accepted socket in a task of its own, or close it if there is no place."""
        if not self._has_place(peer):
            accepted.close()
            return
        place = Place(peer)
        self._tasks[place] = asyncio.create_task(self._serve(place, accepted, service))
        self._tasks[place].add_done_callback(lambda _: self._tasks.pop(place, None))

    async def _serve(self, place: Place, accepted: socket.socket, service: Service) -> None:
        try:
            reader, writer = await place.wait(_open(accepted, service.tls), 2 * HEAD_TIMEOUT_S)
        except OSError:
            accepted.close()
            return
        try:
            await HttpStream(place, service, reader, writer).serve(self._rates)
        except OSError:
            # The client has left, or broke a time limit.
            pass
        except Exception:
            logger.exception("a connection failed")
        finally:
            writer.transport.abort()

    def _has_place(self, peer: Peer) -> bool:
        of_peer = [one for one in self._tasks if one.peer.name == peer.name]
        limit = MAX_CONNECTIONS if peer.privileged else self._most_of_others
        if len(of_peer) < self._most_of_peer and len(self._tasks) < limit:
            return True
        crowd = of_peer if len(of_peer) >= self._most_of_peer else self._tasks
        waiting = [(one.waits_since, one) for one in crowd if one.waits_since is not None]
        if not waiting:
            return False
        self._tasks.pop(min(waiting, key=lambda one: one[0])[1]).cancel()
        return True

    async def close(self, timeout_s: float) -> None:
        """End idle connections at once, and the others after their answer or ``timeout_s``."""
        tasks = list(self._tasks.values())
        for place, task in list(self._tasks.items()):
            if not place.answering:
                task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()


async def _open(
    accepted: socket.socket, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(PART_BYTES, loop)
    protocol = asyncio.StreamReaderProtocol(reader)
    timeout_s = {} if tls is None else {"ssl_handshake_timeout": HEAD_TIMEOUT_S}
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, accepted, ssl=tls, **timeout_s
    )
    # A write waits until all of it has left the process, so that its time limit counts. With 0,
    # asyncio's TLS would wait for an empty buffer to become smaller.
    transport.set_write_buffer_limits(high=1)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
