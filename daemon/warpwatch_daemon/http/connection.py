"""One connection: uvicorn's, with a time-out for silent peers and a short way for scrapes."""

from __future__ import annotations

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from warpwatch_daemon.http.scrapes import Scrape, Scrapes

# A new connection that did not send the head of a request by then is closed.
HEAD_TIMEOUT_S = 10.0
# Between requests: longer than usual intervals of scrapes, so that each does not need a new one.
KEEP_ALIVE_S = 75


class Connection(H11Protocol):
    """Closes a peer that does not send a request: uvicorn alone would wait for ever."""

    def __init__(self, *arguments: Any, scrapes: Scrapes, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._scrapes = scrapes
        self._scrape: Scrape | None = None
        self._answers = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_request(HEAD_TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        idle = self._idle()
        scrape = self._scrape
        if idle and scrape is not None and data == scrape.data and self._answer(scrape):
            return
        before = self.cycle
        super().data_received(data)
        # Whole, and nothing after it: only then these bytes mean this request.
        whole = self.conn.their_state is h11.DONE and self.conn.trailing_data == (b"", False)
        if idle and whole and self.cycle is not before:
            self._scrape = self._scrapes.recognize(data, dict(self.scope))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._answers += 1
        self._expect_request(KEEP_ALIVE_S)

    def _idle(self) -> bool:
        """Between requests, with nothing received of the next, and the peer has read the last."""
        states = (self.conn.our_state, self.conn.their_state)
        waiting = states == (h11.IDLE, h11.IDLE) and not self.conn.trailing_data[0]
        return waiting and not self.flow.write_paused and not self.transport.is_closing()

    def _answer(self, scrape: Scrape) -> bool:
        """False when the usual way has to be taken; nothing was sent then."""
        limit = self.limit_concurrency
        if limit is not None and max(len(self.connections), len(self.tasks)) >= limit:
            return False
        try:
            answer = self._scrapes.answer(scrape, self.server_state.default_headers)
        except Exception:
            # The usual way meets the same fault, and tells and logs it.
            return False
        if answer is None:
            return False
        self._unset_keepalive_if_required()
        self.transport.write(answer)
        self.on_response_complete()
        return True

    def _expect_request(self, timeout_s: float) -> None:
        self.loop.call_later(timeout_s, self._give_up, self.cycle, self._answers)

    def _give_up(self, last: RequestResponseCycle | None, answers: int) -> None:
        if self.cycle is last and self._answers == answers:
            self.transport.close()
