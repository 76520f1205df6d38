"""One connection: uvicorn's, with a time-out for silent peers."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

# A new connection that did not send the head of a request by then is closed.
HEAD_TIMEOUT_S = 10.0
# Between requests: longer than usual intervals of scrapes, so that each does not need a new one.
KEEP_ALIVE_S = 75


class Connection(H11Protocol):
    """Closes a peer that does not send a request: uvicorn alone would wait for ever."""

    def __init__(self, *arguments: Any, head_timeout_s: float, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._head_timeout_s = head_timeout_s

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_request(self._head_timeout_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request(KEEP_ALIVE_S)

    def _expect_request(self, timeout_s: float) -> None:
        self.loop.call_later(timeout_s, self._give_up, self.cycle)

    def _give_up(self, last: RequestResponseCycle | None) -> None:
        if self.cycle is last:
            self.transport.close()
