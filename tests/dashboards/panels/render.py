"""Panels of a dashboard, drawn by Grafana's own components in Chromium.

There is no Grafana server in this: PromQL is answered by a Prometheus, and panels.jsx does with the
answers what the server's side does. Heat maps are left out: they are not a public component.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from tests.dashboards.expressions import ALL, TIMES, substituted, unfolded
from tests.dashboards.monitoring.prometheus import Prometheus

VERSION = "13.2.2"
PARTS = ("data", "ui", "runtime", "schema", "e2e-selectors", "i18n")
PACKAGES = (
    *(f"@grafana/{part}@{VERSION}" for part in PARTS),
    "react@18",
    "react-dom@18",
    "esbuild",
)
DRAWN = ("stat", "bargauge", "timeseries", "table")
COLUMNS, POINTS = 24, 180
WIDTH, HEIGHT = 1600, 4000
# Graphs draw a moment after they are there.
ALL_DRAWN = """() => [...document.querySelectorAll('.panel')].every((panel) =>
  panel.querySelector('.empty, [role=row]')
    || panel.textContent.length > panel.dataset.title.length)
  && [...document.querySelectorAll('.panel canvas')].every((canvas) =>
    canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean))"""
PAGE = """<!doctype html><html><head><link rel="stylesheet" href="panels.css"></head>
<body style="margin:0;background:#111217"><div id="root"></div><script>
window.grafanaBootData = {settings: {}, user: {}};
window.onerror = (message) => { document.title = "failed: " + message; };
window.SHOWN = %s; window.SPAN = %s;
</script><script src="panels.js"></script></body></html>"""


def bundle(folder: Path) -> None:
    """``folder`` gets panels.js, and what it needs before that if it is not there yet."""
    if not (folder / "node_modules").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}")
        flags = ("--ignore-scripts", "--legacy-peer-deps", "--no-audit", "--no-fund")
        _run(folder, "npm", "install", *flags, *PACKAGES)
        _run(folder, "node", "node_modules/esbuild/install.js")
    shutil.copy(Path(__file__).with_name("panels.jsx"), folder)
    assets = [f"--loader:.{kind}=dataurl" for kind in ("svg", "woff2", "png", "ttf")]
    production = '--define:process.env.NODE_ENV="production"'
    output = ("--bundle", "--outfile=panels.js", "--format=iife", "--minify")
    _run(
        folder,
        "node_modules/.bin/esbuild",
        "panels.jsx",
        *output,
        *assets,
        production,
        "--define:global=window",
    )


def _run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=600)


def chosen(dashboard: Mapping[str, Any], titles: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The panels of these rows, or with these titles, in that order and placed anew."""
    found: dict[str, list[dict[str, Any]]] = {}
    row = ""
    for panel in unfolded(dashboard):
        row = panel["title"] if panel["type"] == "row" else row
        if panel["type"] in DRAWN:
            found.setdefault(row, []).append(panel)
            found.setdefault(panel["title"], []).append(panel)
    x, y, height = 0, 0, 0
    for panel in (panel for title in titles for panel in found[title]):
        place = panel["gridPos"]
        if x + place["w"] > COLUMNS:
            x, y, height = 0, y + height, 0
        yield panel | {"gridPos": place | {"x": x, "y": y}}
        x, height = x + place["w"], max(height, place["h"])


def answered(
    dashboard: Mapping[str, Any], titles: Sequence[str], prometheus: Prometheus, span_s: float
) -> tuple[list[dict[str, Any]], tuple[float, float]]:
    """The panels in panels.jsx, and the time that it shows: the newest ``span_s`` seconds."""
    end = time.time()
    span = (end - span_s, end)
    values = {variable["name"]: ALL for variable in dashboard["templating"]["list"]}
    values |= TIMES | {"__range": f"{round(span_s)}s"}
    shown = [
        {
            "panel": panel,
            "answers": [_answer(t, values, prometheus, span) for t in panel["targets"]],
        }
        for panel in chosen(dashboard, titles)
    ]
    return shown, span


def _answer(
    target: Mapping[str, Any],
    values: Mapping[str, str],
    prometheus: Prometheus,
    span: tuple[float, float],
) -> dict[str, Any]:
    promql = substituted(target["expr"], values)
    instant = bool(target.get("instant"))
    step_s = (span[1] - span[0]) / POINTS
    result = (
        prometheus.query(promql, span[1])
        if instant
        else prometheus.query_range(promql, *span, step_s)
    )
    known = {"legend": target["legendFormat"], "instant": instant, "stepMs": step_s * 1000}
    return {"refId": target["refId"], "result": result, **known}


def drawn(
    browser: Browser, folder: Path, shown: list[dict[str, Any]], span: tuple[float, float]
) -> Page:
    """The page on which the panels are, in a window so tall that all are seen."""
    html = folder / "panels.html"
    html.write_text(PAGE % (json.dumps(shown).replace("</", "<\\/"), json.dumps(span)))
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.goto(html.as_uri())
    page.wait_for_function("document.title || document.querySelectorAll('.panel').length")
    assert page.title() == "", page.title()
    page.wait_for_function(ALL_DRAWN)
    return page


def photograph(page: Page, path: Path) -> None:
    page.locator("#root > div").screenshot(path=path)
