"""The fleet's page in a real browser: both sizes of heat map, both themes, the refresh."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.browser import NEEDS_BROWSER, browser, open_page
from tests.fleet.shown import fleet, fleet_state, url
from tests.waiting import DEADLINE_S

pytestmark = NEEDS_BROWSER
__all__ = ["browser", "fleet", "url"]


@pytest.mark.parametrize(("scheme", "width", "ranks"), [("light", 400, 6), ("dark", 1280, 2048)])
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
    assert [at for at, one in enumerate(backgrounds) if one != backgrounds[0]] == [4]
    fleet.now = replace(fleet_state(ranks, 8, None), anomalies=())
    page.get_by_text("All alike").wait_for(timeout=1000 * DEADLINE_S)
    assert complaints == []
