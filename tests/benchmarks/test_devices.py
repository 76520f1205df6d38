"""The parts of the device benchmark that decide its figures."""

import socket
import threading

import pytest

from benchmarks.devices import limits
from benchmarks.processes import CannotMeasure, Scraper, latency, sample_count

PAGE = b"""# HELP up Whether.
# TYPE up gauge
up{gpu="0",uuid="GPU-a"} 1
power{hostname="h",index="1"} 3.5

# EOF
"""


def test_samples_and_latencies_are_counted():
    assert sample_count(PAGE) == 2
    found = latency([0.001] * 99 + [0.5])
    assert (found["p50_ms"], found["scrapes"]) == (1.0, 100)
    assert 1.0 < found["p99_ms"] < 500.0


def test_each_limit_is_judged():
    ours = {"calls_per_s_and_gpu": 11.0, "rss_mib": 65.0, "cpu_s_per_min": 0.5, "samples": 999}
    rows = limits({"0_us": {**ours, "scrape": {"p50_ms": 0.4, "p99_ms": 3.5}}})
    assert {row["what"]: (row["value"], row["met"]) for row in rows} == {
        "samples at 0_us": (999, False),
        "NVML calls a second and GPU at 0_us": (11.0, True),
        "CPU s a minute, scraped, at 0_us": (0.5, True),
        "RSS in MiB at 0_us": (65.0, False),
        "scrape p50 in ms at 0_us": (0.4, True),
        "scrape p99 in ms at 0_us": (3.5, False),
    }


def serve(listener: socket.socket, replies: list[bytes]) -> None:
    """Accept one connection and send a reply in two parts to each request."""
    peer, _ = listener.accept()
    with peer:
        for reply in replies:
            peer.recv(65536)
            peer.sendall(reply[:20])
            peer.sendall(reply[20:])


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def start(listener: socket.socket, *replies: bytes) -> int:
    threading.Thread(target=serve, args=(listener, list(replies)), daemon=True).start()
    return int(listener.getsockname()[1])


def test_a_connection_is_kept_and_the_newest_body_is_the_page(listener):
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    with Scraper(start(listener, head + b"first", head + b"again"), gzip=False) as scraper:
        scraper.scrape()
        assert scraper.body == b"first"
        # The listener accepts only one connection.
        scraper.scrape()
        assert scraper.body == b"again"


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", "503"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nnot that much", "IncompleteRead"),
    ],
)
def test_a_reply_that_is_not_a_whole_page_is_an_error(listener, reply, why):
    with (
        Scraper(start(listener, reply), gzip=True) as scraper,
        pytest.raises(CannotMeasure, match=why),
    ):
        scraper.scrape()
