"""A scraper that costs next to nothing: a socket, the same request bytes, a buffer that stays.

It is the same for every peer, so that what differs is the peer. ``rendering`` takes the page alone.
"""

from __future__ import annotations

import re
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.processes import CannotMeasure
from warpwatch_devices.simulated.device import SimulatedDevice
from warpwatch_devices.simulated.profiles import PROFILES
from warpwatch_exporters.collector import StateCollector
from warpwatch_exporters.prometheus import render
from warpwatch_telemetry.state import (
    STEP_DURATION_BOUNDS_S,
    Histogram,
    JobState,
    RankState,
    State,
)

# What Prometheus 3 sends.
ACCEPT = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
TIMEOUT_S = 10.0
# Below the rate that our daemon allows one peer.
BURST_INTERVAL_S = 0.022
MAX_PAGE_BYTES = 8 * 2**20
RENDERINGS = 200

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSES = re.compile(rb"^HTTP/1\.0|\r\nconnection: *close", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Latency:
    p50_ms: float
    p99_ms: float
    scrapes: int


class Scraper:
    """Keeps its connection as long as the peer does; a new one is part of the time it takes."""

    def __init__(self, port: int, *, gzip: bool) -> None:
        self.connections = 0
        self._port = port
        self._request = (
            f"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            "User-Agent: Prometheus/3.5.0\r\n"
            f"Accept: {ACCEPT}\r\n"
            f"Accept-Encoding: {'gzip' if gzip else 'identity'}\r\n"
            "X-Prometheus-Scrape-Timeout-Seconds: 10\r\n\r\n"
        ).encode()
        self._buffer = bytearray(MAX_PAGE_BYTES)
        self._view = memoryview(self._buffer)
        self._socket: socket.socket | None = None
        self._body = slice(0, 0)

    def __enter__(self) -> Scraper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    @property
    def body(self) -> bytes:
        """The newest page."""
        return bytes(self._view[self._body])

    @property
    def body_bytes(self) -> int:
        return self._body.stop - self._body.start

    def scrape(self) -> float:
        """Seconds from the request to the last byte. Raises CannotMeasure."""
        began = time.perf_counter()
        try:
            self._ask()
        except OSError as error:
            self._close()
            raise CannotMeasure(f"a scrape of port {self._port} failed: {error}") from error
        took_s = time.perf_counter() - began
        if _CLOSES.search(self._buffer, 0, self._body.start):
            self._close()
        return took_s

    def reconnect(self) -> None:
        """After a pause in which the peer may have closed the connection."""
        self._close()

    def _ask(self) -> None:
        if self._socket is None:
            self._connect()
        assert self._socket is not None
        self._socket.sendall(self._request)
        self._receive(self._socket)

    def _receive(self, peer: socket.socket) -> None:
        filled, end = 0, 0
        while not end or filled < end:
            received = peer.recv_into(self._view[filled:])
            if not received:
                raise ConnectionResetError("the peer closed the connection")
            filled += received
            end = end or self._parse_head(filled)

    def _parse_head(self, filled: int) -> int:
        """Where the answer ends; 0 while its head is not whole."""
        head_end = self._buffer.find(b"\r\n\r\n", 0, filled)
        if head_end < 0:
            return 0
        length = _LENGTH.search(self._buffer, 0, head_end)
        status = self._buffer[9:12]
        if length is None or status != b"200":
            raise CannotMeasure(f"port {self._port} answered a scrape with {status.decode()!r}")
        self._body = slice(head_end + 4, head_end + 4 + int(length[1]))
        return self._body.stop

    def _connect(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self._port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections += 1

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def sample_count(page: bytes) -> int:
    return sum(1 for line in page.splitlines() if line and not line.startswith(b"#"))


def latency(times_s: list[float]) -> Latency:
    p99_s = statistics.quantiles(times_s, n=100, method="inclusive")[98]
    p50_ms = round(1000 * statistics.median(times_s), 3)
    return Latency(p50_ms, round(1000 * p99_s, 3), len(times_s))


def burst(scraper: Scraper, scrapes: int) -> list[float]:
    """Seconds of each scrape, at a steady rate, after one that connects and is not counted."""
    times: list[float] = []
    scraper.reconnect()
    scraper.scrape()
    due = time.monotonic()
    for _ in range(scrapes):
        times.append(scraper.scrape())
        due = max(due + BURST_INTERVAL_S, time.monotonic() + BURST_INTERVAL_S / 4)
        time.sleep(max(0.0, due - time.monotonic()))
    return times


def rendering(devices: int, ranks: int) -> dict[str, float]:
    """Processor time in ms of a node's page: the daemon's way, and by prometheus_client alone.

    What the second takes is why the daemon has a renderer of its own: with 8 devices and 8 ranks
    14 ms against 1.2 on a busy core, at each scrape of each node.
    """
    state = _state(devices, ranks)
    registry = CollectorRegistry()
    registry.register(StateCollector(lambda: state))
    writers: dict[str, Callable[[], bytes]] = {
        "page_ms": lambda: render(state),
        "page_by_prometheus_client_ms": lambda: generate_latest(registry),
    }
    times_s: dict[str, list[float]] = {name: [] for name in writers}
    # In turns: what else the machine does then is in both.
    for _ in range(RENDERINGS):
        for name, write in writers.items():
            began = time.thread_time()
            write()
            times_s[name].append(time.thread_time() - began)
    return {name: round(1000 * statistics.median(each), 3) for name, each in times_s.items()}


def _state(devices: int, ranks: int) -> State:
    now = time.time()
    simulated = [SimulatedDevice(index, PROFILES["h100"]) for index in range(devices)]
    steps = Histogram((10,) * (len(STEP_DURATION_BOUNDS_S) + 1), 100.0)
    phases_s = dict.fromkeys(("data_wait", "forward", "backward", "optimizer", "comm"), 1.5)
    return State(
        now,
        "",
        "node",
        devices=tuple(device.advance(now, 1.0, 0.9) for device in simulated),
        ranks=tuple(
            RankState("job", number, str(number), 0, 1, "node", durations=steps, phases_s=phases_s)
            for number in range(ranks)
        ),
        jobs=(JobState("job", ranks, tuple(str(number) for number in range(ranks))),),
    )
