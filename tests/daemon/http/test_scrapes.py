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
def test_a_kept_connection_is_answered_in_the_same_way_until_a_fault(
    serve, agent, headers, monkeypatch
):
    # A page that is rendered ahead between two scrapes would count the first of them.
    monkeypatch.setattr("warpwatch_daemon.http.metrics.AHEAD_INTERVAL_S", -1.0)
    clock = ManualClock()
    host, port = serve({"monotonic": clock.monotonic}).address
    kept = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)

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


@pytest.mark.parametrize(
    ("actions", "rendered_at"),
    [
        # A page is rendered once a second, however many ask.
        ("s0 s0.5 s1 s1.2 s2.25 s2.35", [0.0, 1.2, 2.35]),
        # Rendered ahead for a scraper that comes each second, until it comes each five seconds.
        ("s0 r1", [0.0]),
        ("s0 r1 s1 r2 s2 r4.1", [0.0, 2.0]),
        ("s0 r1 s1 r2 s7 r8", [0.0, 2.0, 7.0]),
    ],
)
def test_a_page_is_as_old_as_its_scraper_allows(agent, actions, rendered_at):
    """s: a scrape, r: the refresh of each second, and the time in seconds."""
    now, rendered, state = [0.0], [], agent.now

    def exported() -> Any:
        rendered.append(now[0])
        return state

    agent.exported = exported
    pages = MetricsPages(agent, lambda: now[0])
    for action in actions.split():
        now[0] = float(action[1:])
        pages.refresh() if action[0] == "r" else pages.page(PLAIN)
    assert rendered == rendered_at


def test_a_fault_while_rendering_ahead_is_left_to_the_next_scrape(agent):
    clock = ManualClock()
    pages = MetricsPages(agent, clock.monotonic)
    for _ in range(2):
        pages.page(PLAIN)
        clock.advance(1.2)
    agent.exported = lambda: 1 / 0
    pages.refresh()
    with pytest.raises(ZeroDivisionError):
        pages.page(PLAIN)
