"""An HTTP server of somebody else's, that keeps what it is sent and answers as the test wants."""

import gzip
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Status, headers and body; None: the connection is closed without an answer.
Answer = tuple[int, dict[str, str], bytes] | None
# Gets method, target, headers and body.
Answering = Callable[[str, str, Any, bytes], Answer]


@contextmanager
def http_server(
    answering: Answering, tls: ssl.SSLContext | None = None, port: int = 0
) -> Iterator[str]:
    """Serve what ``answering`` returns; yields the URL without a slash at its end."""

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = answering(self.command, self.path, self.headers, body)
            if answer is None:
                return
            status, headers, content = answer
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(content))} | headers).items():
                self.send_header(name, value)
            # The client may have ended meanwhile.
            with suppress(ConnectionError):
                self.end_headers()
                self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _do

        def log_message(self, *_: Any) -> None:
            """Write nothing to the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if tls is not None:
        # Each shakes hands in its own thread: a client that leaves before delays no other.
        server.socket = tls.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Receiver:
    """requests: path, headers and body of each. status: what everything is answered with."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any, bytes]] = []
        self.status = 200
        self.url = ""
        self.location = ""

    def bodies(self, path: str = "/") -> list[bytes]:
        return [body for to, _, body in self.requests if to == path]

    def answer(self, _: str, target: str, headers: Any, body: bytes) -> Answer:
        if headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.requests.append((target, headers, body))
        return self.status, {"Location": self.location} if self.location else {}, b""


@contextmanager
def receiver(tls: ssl.SSLContext | None = None, port: int = 0) -> Iterator[Receiver]:
    own = Receiver()
    with http_server(own.answer, tls, port) as own.url:
        yield own
