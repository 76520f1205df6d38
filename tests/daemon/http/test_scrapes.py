"""Scrapes over a kept connection, and how old a page may be."""

from __future__ import annotations

import http.client
from typing import Any

import pytest

from tests.daemon.http.conftest import TIMEOUT_S
from tests.manual_clock import ManualClock
from warpwatch_daemon.http.metrics import Format, MetricsPages

PLAIN = Format(openmetrics=False, gzip=False)


@pytest.mark.parametrize(
    "headers", [{}, {"Accept-Encoding": "gzip"}, {"Accept": "application/openmetrics-text"}]
)
def test_a_kept_connection_is_answered_in_the_same_way_until_a_fault(serve, agent, headers):
    clock = ManualClock()
    address = serve({"monotonic": clock.monotonic}).address
    kept = http.client.HTTPConnection(*address, timeout=TIMEOUT_S)

    def scrape() -> tuple[int, list[tuple[str, str]], bytes]:
        kept.request("GET", "/metrics", headers=headers)
        answer = kept.getresponse()
        sent = [header for header in answer.getheaders() if header[0] != "date"]
        return answer.status, sent, answer.read()

    first, second, third = (scrape() for _ in range(3))
    assert first == second == third
    assert first[0] == 200 and ("x-content-type-options", "nosniff") in first[1]
    clock.advance(60)
    agent.exported = lambda: 1 / 0
    assert scrape()[0] == 500
    assert agent.codes == {200: 3, 500: 1}
    kept.close()


class Pages:
    """The pages of an agent; rendered_at: when each was rendered, in seconds."""

    def __init__(self, agent: Any) -> None:
        self.clock = ManualClock(0.0)
        self.pages = MetricsPages(agent, self.clock.monotonic)
        self.rendered_at: list[float] = []
        self._state = agent.now
        agent.exported = self._exported

    def _exported(self) -> Any:
        self.rendered_at.append(self.clock.monotonic())
        return self._state

    def scrape(self, at: float) -> bytes:
        self.clock.advance(at - self.clock.monotonic())
        return self.pages.page(PLAIN).content

    def refresh(self, at: float) -> None:
        self.clock.advance(at - self.clock.monotonic())
        self.pages.refresh()


@pytest.fixture
def pages(agent):
    return Pages(agent)


def test_a_page_is_rendered_once_a_second_however_many_ask(pages):
    for at in (0.0, 0.5, 1.0, 1.2, 2.25, 2.35):
        pages.scrape(at)
    assert pages.rendered_at == [0.0, 1.2, 2.35]


def test_pages_are_rendered_ahead_only_for_a_peer_that_comes_all_the_time(pages):
    pages.scrape(0.0)
    pages.refresh(1.0)
    assert pages.rendered_at == [0.0]
    pages.scrape(1.0)
    pages.refresh(2.0)
    pages.scrape(2.0)
    assert pages.rendered_at == [0.0, 2.0]
    pages.refresh(4.1)
    assert pages.rendered_at == [0.0, 2.0]
    # It comes every five seconds from now on.
    pages.scrape(7.0)
    pages.refresh(8.0)
    assert pages.rendered_at == [0.0, 2.0, 7.0]


def test_a_fault_while_rendering_ahead_is_left_to_the_next_scrape(pages, agent):
    pages.scrape(0.0)
    pages.scrape(1.0)
    agent.exported = lambda: 1 / 0
    pages.refresh(2.5)
    with pytest.raises(ZeroDivisionError):
        pages.scrape(2.5)
