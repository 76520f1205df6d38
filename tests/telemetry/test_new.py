"""Results of functions and small classes of the telemetry and the runtime, as a golden file."""

import logging
import socket
import threading
from typing import Any

from tests import expressions
from tests.conftest import Cases
from warpwatch_daemon.config import Config
from warpwatch_runtime.http_requests import Requests

MODULES = {
    "": "asyncio io itertools logging stat",
    "warpwatch_telemetry": "alerts anomalies bus_messages captures catalogue clean_text errors "
    "jobs log newest records samples sections state stream xids",
    "warpwatch_runtime": "agent_metrics bus command_line directory files http_requests loading "
    "log_output supervisor",
}


def answered(raw: bytes | None, *sent: Any, **options: Any) -> object:
    """Return what becomes of a server's answer, None for no answer, and what the server got."""
    got: list[bytes] = []
    with socket.socket(socket.AF_UNIX if "socket_path" in options else socket.AF_INET) as server:
        server.bind("server" if "socket_path" in options else ("127.0.0.1", 0))
        server.listen()
        method, url, *more = sent
        place = f"127.0.0.1:{server.getsockname()[1]}"

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                got.append(peer.recv(65536))
                if raw is not None:
                    peer.sendall(raw)
                    peer.shutdown(socket.SHUT_WR)
                # The client leaves.
                peer.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        call = ("send", method, url.replace("SERVER", place), *more)
        found = expressions.play(Requests(**options), call)
        thread.join()
    return *found, got[0].decode().replace(place, "SERVER")


def logged(*calls: Any) -> list[object]:
    """Return as ``play``, and the lines of the log."""
    said = list[object]()
    handler = logging.Handler()
    handler.handle = lambda record: bool(said.append(record.getMessage()))  # type: ignore
    logging.getLogger().addHandler(handler)
    try:
        return expressions.play(*calls) + said
    finally:
        logging.getLogger().removeHandler(handler)


def test_functions_return_the_golden_values(cases: Cases) -> None:
    more = {"Config": Config, "answered": answered, "logged": logged}
    expressions.check(cases, "telemetry/new.txt", MODULES, more)
