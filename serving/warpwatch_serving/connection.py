"""One connection: uvicorn's, counted for its peer, with deadlines for peers that do nothing."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from warpwatch_serving.peer import Peer, identify

# A new connection that did not send the head of a request by then is closed.
HEAD_TIMEOUT_S = 10.0
# Between requests: longer than usual intervals of scrapes, so that each does not need a new one.
KEEP_ALIVE_S = 75
# A peer that reads less than a buffer of an answer in this time gets no more of it.
WRITE_TIMEOUT_S = 10.0
MAX_OF_PEER = 8
# Of all peers but root and the daemon's user, who keep the rest of the server's 128.
MAX_OF_OTHERS = 112

# A refused connection may ask for the reason in this time.
REFUSED_TIMEOUT_S = 1.0

# Alertmanager sends again only after a status of 500 and above.
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s"
)
_TOO_MANY_BODY = (
    b'{"error":{"reason":"too_many_connections",'
    b'"detail":"a peer may have %d connections, and all together %d"}}\n'
    % (MAX_OF_PEER, MAX_OF_OTHERS)
)


class OpenConnections:
    """The connections of each peer, oldest first. For the server's thread alone."""

    def __init__(self) -> None:
        self._of_peer: defaultdict[str, list[Connection]] = defaultdict(list)

    def admit(self, peer: Peer, connection: Connection) -> bool:
        """Whether it may stay: where there are too many, the longest idle one gives way."""
        if not peer.privileged and sum(map(len, self._of_peer.values())) >= MAX_OF_OTHERS:
            return False
        connections = self._of_peer[peer.name]
        if len(connections) >= MAX_OF_PEER:
            idle = next((one for one in connections if one.is_idle()), None)
            if idle is None:
                return False
            idle.give_place()
            idle.transport.abort()
            connections.remove(idle)
        connections.append(connection)
        return True

    def remove(self, peer: str, connection: Connection) -> None:
        connections = self._of_peer[peer]
        if connection in connections:
            connections.remove(connection)
        if not connections:
            del self._of_peer[peer]


class Connection(H11Protocol):
    """Closes a peer that sends no request or reads no answer, which uvicorn would wait for."""

    def __init__(self, *arguments: Any, others: OpenConnections, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._others = others
        self._peer = Peer("")
        self._refused = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._peer = identify(transport)
        self.app_state = {**self.app_state, "peer": self._peer}
        self._refused = not self._others.admit(self._peer, self)
        if self._refused:
            self.give_place()
            self.loop.call_later(REFUSED_TIMEOUT_S, transport.abort)
        self._expect_request(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.remove(self._peer.name, self)
        self._read()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self.transport.write(_TOO_MANY % (len(_TOO_MANY_BODY), _TOO_MANY_BODY))
            self.transport.close()
        elif not self.transport.is_closing():
            super().data_received(data)

    def give_place(self) -> None:
        """Until it is closed, which takes a while, uvicorn would count it against all peers."""
        self.connections.discard(self)

    def is_idle(self) -> bool:
        """Whether it waits for a request, and its peer has taken the last answer."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and self.transport.get_write_buffer_size() == 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size() > 0:
            self._expect_reading()
        self._expect_request(KEEP_ALIVE_S)

    # --- a peer that does not read ---

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read()

    def _expect_reading(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(WRITE_TIMEOUT_S, self._abort_unread)

    def _read(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _abort_unread(self) -> None:
        self._deadline = None
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()

    # --- a peer that does not ask ---

    def _expect_request(self, timeout_s: float) -> None:
        self.loop.call_later(timeout_s, self._give_up, self.cycle)

    def _give_up(self, last: RequestResponseCycle | None) -> None:
        if self.cycle is last and (last is None or last.response_complete):
            self.transport.abort()
