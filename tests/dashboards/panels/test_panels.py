"""The main panels, drawn by Grafana's own components from what a real Prometheus answers.

``PICTURES=docs/images make acceptance ARGS=alerts`` renews the pictures of docs/.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from playwright.sync_api import Browser

from tests.browser import NEEDS_BROWSER, browser
from tests.dashboards.expressions import EMPTY_WHEN_HEALTHY, dashboards
from tests.dashboards.fleet import Fleet, fleet
from tests.dashboards.monitoring.prometheus import every_second
from tests.dashboards.panels.render import answered, bundle, drawn, photograph
from warpwatch_dashboards import rule_files

# Long enough for a straggler's baseline, and for graphs that show a course.
HEALTHY_SCRAPES, SPAN_S = 60.0, 120.0
SCRAPED = 'count_over_time(warpwatch_steps_total{{rank="3"}}[10m]) > {}'
SHOWN = yaml.safe_load(Path(__file__).with_name("shown.yaml").read_text())

pytestmark = [
    pytest.mark.alerts,
    pytest.mark.torch,
    *NEEDS_BROWSER,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]
__all__ = ["browser"]


@pytest.fixture(scope="module")
def components(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where panels.js and what it is made of are."""
    folder = tmp_path_factory.mktemp("components")
    bundle(folder)
    return folder


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A job that was well and of which rank 3 is late now."""
    folder = tmp_path_factory.mktemp("fleet")
    rules = every_second(rule_files.FOLDER / rule_files.RECORDING, folder)
    with fleet(folder, rules=[rules]) as running:
        running.start_training()
        running.wait_for('rate(warpwatch_steps_total{rank="3"}[10s]) > 0')
        running.wait_for(SCRAPED.format(HEALTHY_SCRAPES))
        running.go_wrong(slow=3)
        running.wait_for('warpwatch_anomaly_info{kind="straggler"} == 1')
        running.wait_for(SCRAPED.format(SPAN_S))
        yield running


@pytest.mark.parametrize("name", SHOWN)
def test_panels_draw_what_prometheus_answers(name, components, busy, browser, tmp_path):
    shown, span = answered(dashboards()[name], SHOWN[name], busy.prometheus, SPAN_S)
    page = drawn(browser, components, shown, span)
    assert page.locator(".panel").count() == len(shown) >= 6
    empty = page.locator(".panel:has(.empty)")
    titles = {element.get_attribute("data-title") for element in empty.all()}
    assert titles <= {
        one["panel"]["title"]
        for one in shown
        if one["panel"]["description"].endswith(EMPTY_WHEN_HEALTHY)
    }
    picture = Path(os.environ.get("PICTURES", tmp_path)) / f"dashboard-{name}.png"
    photograph(page, picture)
    assert picture.stat().st_size > 20_000
    page.close()


def test_a_straggler_is_named(components: Path, busy: Fleet, browser: Browser) -> None:
    fleet_page = dashboards()["fleet"]
    shown, span = answered(fleet_page, ["Anomalies now"], busy.prometheus, SPAN_S)
    page = drawn(browser, components, shown, span)
    row = page.locator("[role=row]", has_text="straggler").inner_text()
    assert "gpu-02" in row and "llama-7b" in row
    page.close()
