"""A forwarded port, as `ssh -L` and `kubectl port-forward` open one."""

import contextlib
import socketserver
import threading
from collections.abc import Iterator
from socket import SHUT_WR, create_connection, socket


def _copy(source: socket, target: socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(SHUT_WR)


class _Forwarder(socketserver.ThreadingTCPServer):
    # A browser keeps its connections; they end with it or with the server behind.
    daemon_threads = True


@contextlib.contextmanager
def forwarded(to: tuple[str, int]) -> Iterator[int]:
    """Yield a port of loopback whose connections go to the address."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with create_connection(to) as there:
                answers = threading.Thread(target=_copy, args=(there, self.request), daemon=True)
                answers.start()
                _copy(self.request, there)
                answers.join()

    with _Forwarder(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()
