"""An HTTP server of somebody else's, that keeps what it is sent and answers as the test wants."""

from __future__ import annotations

import gzip
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """requests: path, headers and body of each. status: what everything is answered with."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any, bytes]] = []
        self.status = 200
        self.url = ""
        self.location = ""

    def bodies(self, path: str = "/") -> list[bytes]:
        return [body for to, _, body in self.requests if to == path]


@contextmanager
def receiver(tls: ssl.SSLContext | None = None, port: int = 0) -> Iterator[Receiver]:
    own = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            own.requests.append((self.path, self.headers, body))
            self.send_response(own.status)
            if own.location:
                self.send_header("Location", own.location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    own.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield own
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
