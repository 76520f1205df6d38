"""Scrapes an exporter as Prometheus does, and measures the latency."""

from __future__ import annotations

import http.client
import statistics
import time
from collections.abc import Mapping

from benchmarks.processes import CannotMeasure

# The header of Prometheus 3.
ACCEPT = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
TIMEOUT_S = 10.0
# This rate is below the one that our daemon allows one client.
BURST_INTERVAL_S = 0.022


class Scraper:
    """A client that keeps its connection while the exporter does.

    Connecting is part of the measured time. ``body`` is the newest page, as it was sent.
    """

    def __init__(self, port: int, *, gzip: bool) -> None:
        self.body = b""
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        self._headers = {
            "User-Agent": "Prometheus/3.5.0",
            "Accept": ACCEPT,
            "Accept-Encoding": "gzip" if gzip else "identity",
            "X-Prometheus-Scrape-Timeout-Seconds": "10",
        }

    def __enter__(self) -> Scraper:
        return self

    def __exit__(self, *error: object) -> None:
        self.disconnect()

    def scrape(self) -> float:
        """Return the seconds from the request to the last byte. Raises CannotMeasure."""
        began = time.perf_counter()
        try:
            self._connection.request("GET", "/metrics", headers=self._headers)
            reply = self._connection.getresponse()
            self.body = reply.read()
        except (OSError, http.client.HTTPException) as error:
            self.disconnect()
            cause = f"{type(error).__name__}: {error}"
            raise CannotMeasure(
                f"a scrape of port {self._connection.port} failed: {cause}"
            ) from error
        took_s = time.perf_counter() - began
        if reply.status != http.client.OK:
            raise CannotMeasure(
                f"port {self._connection.port} answered a scrape with {reply.status}"
            )
        return took_s

    def disconnect(self) -> None:
        """Disconnect; the next scrape connects again."""
        self._connection.close()


def sample_count(page: bytes) -> int:
    return sum(1 for line in page.splitlines() if line and not line.startswith(b"#"))


def latency(times_s: list[float]) -> dict[str, float]:
    p99_s = statistics.quantiles(times_s, n=100, method="inclusive")[98]
    p50_ms, p99_ms = round(1000 * statistics.median(times_s), 3), round(1000 * p99_s, 3)
    return {"p50_ms": p50_ms, "p99_ms": p99_ms, "scrapes": len(times_s)}


def burst(scraper: Scraper, scrapes: int) -> list[float]:
    """Return the seconds of each scrape at a steady rate, without the first, which connects."""
    times: list[float] = []
    # The exporter may have closed an idle connection.
    scraper.disconnect()
    scraper.scrape()
    due = time.monotonic()
    for _ in range(scrapes):
        times.append(scraper.scrape())
        due = max(due + BURST_INTERVAL_S, time.monotonic() + BURST_INTERVAL_S / 4)
        _sleep_until(due)
    return times


def each_second(
    scrapers: Mapping[str, Scraper], seconds: int, times: dict[str, list[float]]
) -> None:
    """Scrape each exporter once per second, and append the seconds of each scrape to ``times``."""
    began = time.monotonic()
    for second in range(seconds):
        for place, (name, scraper) in enumerate(scrapers.items()):
            _sleep_until(began + second + place / len(scrapers))
            times[name].append(scraper.scrape())
    _sleep_until(began + seconds)


def _sleep_until(due: float) -> None:
    time.sleep(max(0.0, due - time.monotonic()))
