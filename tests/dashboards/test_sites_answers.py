"""Every expression of every dashboard, answered by a real Prometheus that knows six clusters."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import pytest

from tests.cases import cases
from tests.dashboards.conftest import Promtool
from tests.dashboards.expressions import NAMES, dashboards, expressions
from tests.dashboards.monitoring.prometheus import Prometheus, every_second, prometheus
from tests.dashboards.sites import SCHEDULERS, history
from tests.waiting import eventually
from warpwatch_dashboards import rule_files

TIMES = {"__rate_interval": "5m", "__interval": "1m", "__interval_ms": "60000", "__range": "30m"}
# The clusters have trainings only.
SHOWN = [name for name in NAMES if name != "inference-server"]
NONE_WHILE_IDLE = cases(__file__)["none_while_idle"]


@pytest.fixture(scope="module")
def sites(promtool: Promtool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("sites")
    page = folder / "history.txt"
    with page.open("w") as file:
        file.writelines(f"{line}\n" for line in history())
    promtool("tsdb", "create-blocks-from", "openmetrics", page, folder / "tsdb")
    rules = every_second(rule_files.FOLDER / rule_files.RECORDING, folder, "5s")
    with prometheus(folder, {}, rules=[rules]) as server:
        for last in ("fleet:device_busy:ratio_rate5m", "job:slow_steps:share_rate10m"):
            recorded = f'warpwatch:{last}{{cluster="slurm-fault"}}'
            eventually(partial(server.query, recorded), "the rules have recorded")
        yield server


def unanswered(sites: Prometheus, name: str, cluster: str) -> set[str]:
    asked = expressions(dashboards()[name], {"cluster": cluster, **TIMES})
    return {where(one.where) for one in asked if not sites.query(one.promql)}


def empty_when_healthy(name: str) -> set[str]:
    asked = expressions(dashboards()[name])
    return {where(one.where) for one in asked if one.empty_when_healthy}


def where(text: str) -> str:
    return text.partition(": ")[2]


@pytest.mark.parametrize(("name", "scheduler"), list(product(SHOWN, SCHEDULERS)))
def test_a_cluster_answers_all_but_what_is_empty_in_its_state(sites, name, scheduler):
    healthy = empty_when_healthy(name)
    assert unanswered(sites, name, f"{scheduler}-healthy") == healthy
    assert unanswered(sites, name, f"{scheduler}-fault") == set()
    idle = unanswered(sites, name, f"{scheduler}-idle")
    if name == "training-job":
        # There is no job to choose.
        asked = expressions(dashboards()["training-job"])
        always = {"variable cluster", "variable node", "variable instance"}
        assert {where(one.where) for one in asked} - idle == always
    else:
        assert idle == healthy.union(NONE_WHILE_IDLE[name])
