"""A web server that Prometheus scrapes and Alertmanager tells."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Web:
    """Serves pages by path, made when they are asked for, and keeps what is posted, and when."""

    def __init__(self, pages: Mapping[str, Callable[[], bytes]]) -> None:
        self.posted: dict[str, list[Any]] = {}
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(pages[self.path]())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                note = json.loads(body) | {"received": time.time()}
                web.posted.setdefault(self.path, []).append(note)
                self.answer(b"")

            def answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever)

    @contextmanager
    def serving(self) -> Iterator[Web]:
        self._thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
