"""The parts of the device benchmark that decide what it says."""

import socket
import threading

import pytest

from benchmarks.devices import Plan
from benchmarks.isolation import gpu_lines
from benchmarks.limits import judge
from benchmarks.processes import CannotMeasure
from benchmarks.scraping import Scraper, latency, sample_count

PAGE = b"""# HELP up Whether.
# TYPE up gauge
up{gpu="0",uuid="GPU-a"} 1
up{gpu="1",uuid="GPU-b"} 0
power{hostname="h",index="1"} 3.5

# EOF
"""


def test_only_samples_are_counted():
    assert sample_count(PAGE) == 3


def test_lines_are_told_apart_by_their_gpu_whatever_its_label():
    assert gpu_lines(PAGE) == {
        0: frozenset({b'up{gpu="0",uuid="GPU-a"} 1'}),
        1: frozenset({b'up{gpu="1",uuid="GPU-b"} 0', b'power{hostname="h",index="1"} 3.5'}),
    }


def test_quantiles_are_in_milliseconds():
    found = latency([0.001] * 99 + [0.5])
    assert (found.p50_ms, found.scrapes) == (1.0, 100)
    assert 1.0 < found.p99_ms < 500.0


def test_a_limit_is_judged_by_the_worst_figure():
    mode = {"calls_per_s_and_gpu": 11.0, "rss_mib": 40.0, "cpu_s_per_min": 0.5}
    quick, slow = {"p50_ms": 0.4, "p99_ms": 2.0}, {"p50_ms": 0.6, "p99_ms": 3.5}
    cell = {
        "idle": mode,
        "scraped": {**mode, "rss_mib": 51.0},
        "samples": 999,
        "scrape": {"gzip": quick, "plain": slow},
    }
    rows = judge({"0_us": cell}, {"scrape": quick})
    assert {row["what"]: (row["value"], row["met"]) for row in rows} == {
        "samples at 0_us": (999, False),
        "NVML calls a second and GPU at 0_us": (11.0, True),
        "CPU s a minute, scraped, at 0_us": (0.5, True),
        "goal: CPU s a minute, scraped, at 0_us": (0.5, False),
        "RSS in MiB at 0_us": (51.0, False),
        "scrape p50 in ms at 0_us": (0.6, True),
        "scrape p99 in ms at 0_us": (3.5, False),
        "scrape p50 in ms with a hung GPU": (0.4, True),
        "scrape p99 in ms with a hung GPU": (2.0, True),
    }


def test_the_plan_follows_the_environment(monkeypatch):
    monkeypatch.setenv("WARPWATCH_BENCH_QUICK", "1")
    monkeypatch.setenv("WARPWATCH_BENCH_DEVICES_WINDOW_S", "2.5")
    plan = Plan.from_environment()
    assert (plan.window_s, plan.rounds) == (2.5, 1)
    monkeypatch.setenv("WARPWATCH_BENCH_DEVICES_ROUNDS", "many")
    with pytest.raises(CannotMeasure, match="DEVICES_ROUNDS"):
        Plan.from_environment()


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
        scraper.scrape()
        assert (scraper.body, scraper.connections) == (b"again", 1)


def test_an_answer_that_is_no_page_is_said(listener):
    refused = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
    with (
        Scraper(start(listener, refused), gzip=True) as scraper,
        pytest.raises(CannotMeasure, match="503"),
    ):
        scraper.scrape()


def test_a_connection_that_ends_early_is_said(listener):
    short = b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nnot that much"
    with (
        Scraper(start(listener, short), gzip=True) as scraper,
        pytest.raises(CannotMeasure, match="closed the connection"),
    ):
        scraper.scrape()
