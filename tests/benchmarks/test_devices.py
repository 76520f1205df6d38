"""The parts of the device benchmark that decide what it says."""

import socket
import threading

import pytest

from benchmarks.devices import limits
from benchmarks.isolation import gpu_lines
from benchmarks.processes import CannotMeasure
from benchmarks.scraping import Scraper, latency, sample_count

PAGE = b"""# HELP up Whether.
# TYPE up gauge
up{gpu="0",uuid="GPU-a"} 1
up{gpu="1",uuid="GPU-b"} 0
power{hostname="h",index="1"} 3.5

# EOF
"""


def test_samples_are_counted_and_told_apart_by_their_gpu_whatever_its_label():
    assert sample_count(PAGE) == 3
    assert gpu_lines(PAGE) == {
        0: frozenset({b'up{gpu="0",uuid="GPU-a"} 1'}),
        1: frozenset({b'up{gpu="1",uuid="GPU-b"} 0', b'power{hostname="h",index="1"} 3.5'}),
    }
    found = latency([0.001] * 99 + [0.5])
    assert (found["p50_ms"], found["scrapes"]) == (1.0, 100)
    assert 1.0 < found["p99_ms"] < 500.0


def test_a_limit_is_judged_by_the_worst_figure():
    mode = {"calls_per_s_and_gpu": 11.0, "rss_mib": 40.0, "cpu_s_per_min": 0.5}
    scrape = {"p50_ms": 0.4, "p99_ms": 3.5}
    ours = {"idle": mode, "scraped": {**mode, "rss_mib": 65.0}, "samples": 999, "scrape": scrape}
    rows = limits({"0_us": ours}, {"scrape": {**scrape, "p50_ms": 2.1}})
    assert {row["what"]: (row["value"], row["met"]) for row in rows} == {
        "samples at 0_us": (999, False),
        "NVML calls a second and GPU at 0_us": (11.0, True),
        "CPU s a minute, scraped, at 0_us": (0.5, True),
        "RSS in MiB at 0_us": (65.0, False),
        "scrape p50 in ms at 0_us": (0.4, True),
        "scrape p99 in ms at 0_us": (3.5, False),
        "scrape p50 in ms with a hung GPU": (2.1, False),
        "scrape p99 in ms with a hung GPU": (3.5, False),
    }


def serve(listener: socket.socket, answers: list[bytes]) -> None:
    """One connection: an answer in two parts for each request."""
    peer, _ = listener.accept()
    with peer:
        for answer in answers:
            peer.recv(65536)
            peer.sendall(answer[:20])
            peer.sendall(answer[20:])


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def start(listener: socket.socket, *answers: bytes) -> int:
    threading.Thread(target=serve, args=(listener, list(answers)), daemon=True).start()
    return int(listener.getsockname()[1])


def test_a_connection_is_kept_and_the_newest_body_is_the_page(listener):
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    with Scraper(start(listener, head + b"first", head + b"again"), gzip=False) as scraper:
        scraper.scrape()
        assert scraper.body == b"first"
        # The listener takes one connection only.
        scraper.scrape()
        assert scraper.body == b"again"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", "503"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nnot that much", "IncompleteRead"),
    ],
)
def test_an_answer_that_is_no_whole_page_is_an_error(listener, answer, why):
    with (
        Scraper(start(listener, answer), gzip=True) as scraper,
        pytest.raises(CannotMeasure, match=why),
    ):
        scraper.scrape()
