"""Results of functions and small classes of the telemetry and the runtime, as a golden file."""

import asyncio
import json
import logging
import socket
import threading
from contextlib import suppress
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import expressions
from tests.conftest import Cases
from tests.daemon.http.certificates import make_certificate
from tests.manual_clock import ManualClock
from tests.waiting import DEADLINE_S
from warpwatch_daemon.config import Config
from warpwatch_runtime.bus import Bus, BusConfig, StreamReader, Turns
from warpwatch_runtime.http_requests import Requests

MODULES = {
    "": "io itertools json logging threading",
    "warpwatch_telemetry": "alerts anomalies bus_messages captures catalogue clean_text errors "
    "jobs log newest records samples sections state stream xids",
    "warpwatch_runtime": "agent_metrics bus command_line directory files http_requests loading "
    "log_output supervisor",
}


def answered(raw: bytes | None, *sent: Any, **options: Any) -> object:
    """Return what becomes of a server's answer, None for no answer, and what the server got."""
    got = bytearray()
    with socket.socket(socket.AF_UNIX if "socket_path" in options else socket.AF_INET) as server:
        server.bind(str(options.get("socket_path", "")) or ("127.0.0.1", 0))
        server.listen()
        method, url, *more = sent
        last = more[0] if more else b"\r\n\r\n"
        place = f"127.0.0.1:{server.getsockname()[1]}"

        def answer() -> None:
            peer, _ = server.accept()
            peer.settimeout(DEADLINE_S)
            with peer, suppress(OSError):
                while part := b"" if got.endswith(last) else peer.recv(65536):
                    got.extend(part)
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
    return *found, got.decode().replace(place, "SERVER")


def connecting(**config: Any) -> list[Any]:
    """Return how a bus connects, and what it logs of outages and when it connects again."""
    bus, given = Bus(BusConfig(**config), "a"), list[Any]()

    class Client(SimpleNamespace):
        is_connected, is_closed, last_error = True, False, "gone"

        async def connect(self, url: str, **options: Any) -> None:
            if tls := options.get("tls"):
                options["tls"] = tls.verify_mode.name, tls.cert_store_stats()["x509"] == 1
            given.append((url, options))

        async def close(self) -> None:
            given.append("closed")

    async def connect() -> None:
        await bus.connect()
        options = dict(given[0][1])
        given[0][1].pop("error_cb"), given[0][1].pop("reconnected_cb")
        for _ in range(2):
            await options["error_cb"](OSError("away"))
            await options["error_cb"](OSError("away"))
            await options["reconnected_cb"]()
        await bus.connect()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nats.aio.client.Client", Client)
        said = logged(asyncio, ("run", connect()))
    return [*given[:2], *said, bus.is_connected, bus.is_closed]


def reading(*events: Any) -> list[Any]:
    """Return what a reader of a stream does with these events.

    Seconds pass before a check. A message has its number in the stream, and for this reader.
    """
    clock, did = ManualClock(), list[Any]()

    class Server(SimpleNamespace):
        subject, turns, new_inbox = "inbox", Turns(clock.monotonic), "inbox".lower

        async def subscribe(self, inbox: str, cb: Any) -> Any:
            did.append("subscribe")
            return self

        async def unsubscribe(self) -> None:
            did.append("unsubscribe")

        async def publish(self, subject: str) -> None:
            did.append(f"reply to {subject}")

        async def request(self, subject: str, body: bytes) -> bytes:
            did.append((subject, json.loads(body)["config"].get("opt_start_seq")))
            return b"{}"

    server: Any = Server()
    server.client = server
    reader = StreamReader(server, "S", "s.>", 1e9, did.append, clock.monotonic)

    async def play() -> None:
        for event in events:
            if isinstance(event, tuple):
                number = SimpleNamespace(stream=event[0], consumer=event[1])
                about = SimpleNamespace(sequence=number, timestamp=datetime.fromtimestamp(5, UTC))
                event = {"metadata": about, "headers": {"Nats-Msg-Id": f"b-{event[0]}"}}
            if isinstance(event, dict):
                said = {"subject": "s.a", "data": b"x", "reply": ""} | event
                await reader._received(cast(Any, SimpleNamespace(**said)))
            else:
                clock.advance(event)
                await reader.check()

    asyncio.run(play())
    return did


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
    more = {"Config": Config, "answered": answered, "logged": logged, "connecting": connecting}
    more |= {"make_certificate": make_certificate, "reading": reading}
    expressions.check(cases, "telemetry/functions.txt", MODULES, more)
