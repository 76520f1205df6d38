"""The fleet's page in a real browser: heat maps, long lists, both themes, search, refresh."""

from dataclasses import replace

import pytest

from tests.browser import NEEDS_BROWSER, browser, open_page, picture
from tests.fleet.shown import crowded_state, fleet, fleet_state, server, url

pytestmark = NEEDS_BROWSER
__all__ = ["browser", "fleet", "server", "url"]
# The texts of a cell that overlap, or take more than one line.
CROWDED_CELLS = """[...document.querySelectorAll('.large .cells i')].filter(cell => {
    const [rank, own, wait] = [...cell.children].map(part => part.getBoundingClientRect());
    const tallest = Math.max(own.height, wait.height);
    return own.left - rank.right < 4 || rank.top !== own.top || tallest > 24;
}).length"""


@pytest.mark.parametrize(("scheme", "width", "ranks"), [("light", 390, 32), ("dark", 1280, 2048)])
def test_the_map_fits_and_shows_who_is_slow(browser, url, fleet, scheme, width, ranks):
    complaints: list[str] = []
    fleet.now = fleet_state(ranks, 8 if ranks > 8 else 2, 4)
    viewport = {"width": width, "height": 900}
    page = open_page(browser, url, complaints, viewport=viewport, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    backgrounds = page.evaluate(
        "[...document.querySelectorAll('.cells i')].map(i => getComputedStyle(i).backgroundImage)"
    )
    assert len(backgrounds) == ranks
    assert page.evaluate(CROWDED_CELLS) == 0
    assert [at for at, one in enumerate(backgrounds) if one != backgrounds[0]] == [4]
    if scheme == "dark":
        picture(page, "fleet-dark", 1320)
    fleet.now = replace(fleet_state(ranks, 8, None), anomalies=())
    page.get_by_text("All alike").wait_for()
    assert complaints == []


@pytest.mark.parametrize(
    ("scheme", "width", "tallest", "name"),
    [("dark", 390, 9500, "fleet-phone"), ("light", 1280, 4000, "fleet-light")],
)
def test_250_nodes_and_189_jobs_stay_short_and_are_searched(
    browser, url, fleet, scheme, width, tallest, name
):
    complaints: list[str] = []
    fleet.now = crowded_state()
    viewport = {"width": width, "height": 900}
    page = open_page(browser, url, complaints, viewport=viewport, color_scheme=scheme)
    root = "document.documentElement"
    assert page.evaluate(f"{root}.scrollWidth") == width
    assert page.evaluate(f"{root}.scrollHeight") < tallest
    picture(page, name, 1900)
    search = page.get_by_role("searchbox")
    search.press_sequentially("gpu-155")
    page.get_by_text("2 of 189 jobs").wait_for()
    assert search.input_value() == "gpu-155" and page.url.endswith("/?q=gpu-155")
    page.get_by_role("link", name="Without q gpu-155").click()
    page.get_by_text("2,000 ranks").wait_for()
    assert complaints == []
