"""The page in a real browser: themes, widths, the policy, and the refresh."""

from dataclasses import replace

import pytest

from tests.browser import NEEDS_BROWSER, browser, open_page, picture
from tests.daemon.http.conftest import link_to
from warpwatch_serving.server import Server

pytestmark = NEEDS_BROWSER
__all__ = ["browser"]
OVERFLOWING = (
    "[...document.querySelectorAll('.card')].filter(c => c.scrollWidth > c.clientWidth).length"
)


def entry(server: Server) -> str:
    return server.url.rstrip("/") + link_to(server)


@pytest.mark.parametrize(
    ("scheme", "width", "name"), [("dark", 390, "page-phone"), ("light", 1280, "page-light")]
)
def test_the_page_fits_and_nothing_complains(browser, shared_server, agent, scheme, width, name):
    complaints: list[str] = []
    viewport = {"width": width, "height": 900}
    page = open_page(
        browser, entry(shared_server), complaints, viewport=viewport, color_scheme=scheme
    )
    picture(page, name, 1900)
    assert page.evaluate(OVERFLOWING) == 0
    long_name = "a-job-with-one-very-long-name-" * 4
    job = replace(agent.now.jobs[0], name=long_name)
    ranks = tuple(replace(rank, job=long_name) for rank in agent.now.ranks)
    agent.now = replace(agent.now, jobs=(job,), ranks=ranks)
    page.reload()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(245, 246, 248)", "dark": "rgb(14, 17, 22)"}[scheme]
    assert complaints == []


def test_the_page_follows_the_daemon_without_a_jump(browser, shared_server, agent):
    complaints: list[str] = []
    viewport = {"width": 1280, "height": 500}
    page = open_page(browser, entry(shared_server), complaints, viewport=viewport)
    page.evaluate("scrollTo(0, 400)")
    agent.now = replace(agent.now, anomalies=())
    page.get_by_role("heading", name="All well: 8 GPUs, 2 ranks").wait_for()
    assert page.evaluate("scrollY") > 0
    assert page.title().startswith("All well")
    assert complaints == []
