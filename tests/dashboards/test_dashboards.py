"""The dashboards as Grafana gets them, and what they ask Prometheus for."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest

from tests.dashboards.expressions import (
    EMPTY_WHEN_HEALTHY,
    FOLDER,
    NAMES,
    dashboards,
    expressions,
    panels,
)
from tests.dashboards.promql_labels import labels_of
from warpwatch_dashboards.__main__ import FILES, main
from warpwatch_dashboards.panels import EMPTY_WHEN_HEALTHY as SAID

DASHBOARDS = dashboards()
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def test_what_is_committed_is_what_is_generated(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("warpwatch_dashboards.__main__.FOLDER", tmp_path)
    (tmp_path / "provisioning").mkdir()
    main()
    texts = {path: (tmp_path / path).read_text() for path in FILES}
    assert {path: (FOLDER / path).read_text() for path in FILES} == texts, "generate them anew"


def test_every_dashboard_is_generated() -> None:
    assert {f"{name}.json" for name in NAMES} <= FILES.keys()
    assert {path.stem for path in FOLDER.glob("*.json")} == set(NAMES)


def test_the_package_can_be_found_without_what_generates_it() -> None:
    code = "import sys, warpwatch_dashboards; print('grafana_foundation_sdk' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("name", NAMES)
def test_a_panel_says_what_it_means(name: str) -> None:
    for panel in panels(DASHBOARDS[name]):
        assert re.fullmatch(r"[A-Z0-9].{15,}\.", panel["description"], re.DOTALL), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == SOURCE
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["datasource"] == SOURCE
            assert panel["type"] in ("table", "stat") or target["legendFormat"], panel["title"]
    assert SAID == EMPTY_WHEN_HEALTHY


def test_links_lead_to_dashboards_variables_and_columns_that_exist() -> None:
    variables = {
        f"/d/{dashboard['uid']}": {one["name"] for one in dashboard["templating"]["list"]}
        for dashboard in DASHBOARDS.values()
    }
    pages = set()
    for panel in (panel for dashboard in DASHBOARDS.values() for panel in panels(dashboard)):
        for link in (one["url"] for one in panel["fieldConfig"]["defaults"].get("links", ())):
            page = link.split("?")[0]
            pages.add(page)
            assert set(re.findall(r"var-(\w+)=", link)) <= variables[page]
            assert "${__url_time_range}" in link and "${datasource:queryparam}" in link
            columns = re.findall(r"__data\.fields\.(\w+)", link)
            shown = panel["transformations"][-1]["options"]["renameByName"] if columns else {}
            assert set(columns) <= set(shown.values())
    assert pages == {"/d/warpwatch-node", "/d/warpwatch-training-job"}


@pytest.mark.parametrize("name", NAMES)
def test_metrics_and_labels_exist(name: str) -> None:
    asked = list(expressions(DASHBOARDS[name]))
    assert len(asked) > 30
    for expression in asked:
        found = labels_of(promql.parse(expression.promql))
        assert set(expression.labels) <= found, expression.where
