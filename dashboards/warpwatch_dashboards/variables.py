"""The variables of the dashboards, each chained to those before it, and their marks over time.

All is ``.*``, which also matches series without the label. Grafana begins with All where there is
one, else with the first. A mark of an anomaly or capture links to the dashboard of its agent's
node, and with ``http.public_url`` to the anomaly's page.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import DataSourceRef

from warpwatch_dashboards.links import NODE
from warpwatch_dashboards.queries import (
    AGENT,
    JOB,
    NO_FLEET,
    OF_JOB,
    PLACE,
    WINDOW,
    anomalies,
    grown,
    ranks_by_device,
    series,
    workloads,
)

SOURCE = DataSourceRef("prometheus", "${datasource}")

_CLUSTER = 'cluster=~"$cluster"'
_NODE = f'{_CLUSTER},node=~"$node"'
# Grafana's PromVariableQueryType: text, as label_values() and query_result() are written.
_CLASSIC_QUERY = 5
_ANY = 'namespace!=""'
_ALL = models.VariableOption(text=["All"], value=["$__all"])


def of_agents() -> list[builders.DatasourceVariable | builders.QueryVariable]:
    """Return the selectors of the chosen agents and nodes."""
    return [datasource(), cluster(), node(), instance()]


def datasource() -> builders.DatasourceVariable:
    return builders.DatasourceVariable("datasource").label("Data source").type("prometheus")


def cluster() -> builders.QueryVariable:
    return _all(_many("cluster", "Cluster", _values("build_info", "", "cluster")))


def node() -> builders.QueryVariable:
    return _all(_many("node", "Node", _values("build_info", _CLUSTER, "node")))


def instance() -> builders.QueryVariable:
    """Return the variable of the agent's address, which identifies hosts without ``node``."""
    return _all(one_instance())


def one_instance() -> builders.QueryVariable:
    """Return the same with one agent at first: every device is too much for a page of a fleet."""
    return _many("instance", "Agent", _values("build_info", f"{_NODE},{NO_FLEET}", "instance"))


def gpu() -> builders.QueryVariable:
    return _all(_many("gpu", "GPU", _values("device_up", AGENT, "gpu")))


def namespace() -> builders.QueryVariable:
    """Return the variable of namespaces with devices, and of users of Slurm jobs."""
    return _all(_of_result("namespace", "Namespace", f"group by (namespace) ({workloads(_ANY)})"))


def job() -> builders.QueryVariable:
    """Return the jobs of the time range, except those only on devices of other namespaces."""
    ranks = f"last_over_time({series('rank_info', AGENT)}[$__range])"
    by_device = f'label_replace({ranks}, "uuid", "$1", "device", "(.+)")'
    mine, others = (
        f"last_over_time({workloads(where)}[$__range:$__interval])"
        for where in ('namespace=~"$namespace"', 'namespace!~"$namespace"')
    )
    foreign = f"({others} unless on ({PLACE}, uuid) {mine})"
    query = f"group by (training_job) ({by_device} unless on ({PLACE}, uuid) {foreign})"
    return _of_result("training_job", "Job", query, "job")


def holder() -> builders.CustomVariable:
    """Return the label by which GPU hours are added up; Slurm has account and partition."""
    shown = models.VariableOption(text="Namespace", value="namespace")
    by = "Namespace : namespace, Account : account, Partition : partition"
    return builders.CustomVariable("holder").label("GPU hours by").values(by).current(shown)


def prices() -> list[builders.TextBoxVariable]:
    return [
        builders.TextBoxVariable("price").label("Price of 1 kWh").default_value("0.15"),
        builders.TextBoxVariable("gpu_price").label("Price of 1 GPU hour").default_value("2"),
    ]


def _values(name: str, where: str, label: str) -> str:
    return f"label_values({series(name, where)}, {label})"


def _of_result(label: str, title: str, query: str, name: str = "") -> builders.QueryVariable:
    """Return the values of a label in a query's result."""
    variable = _many(name or label, title, f"query_result({query})")
    return variable.regex(f'/{label}="([^"]+)"/')


def _many(name: str, label: str, query: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query({"query": query, "qryType": _CLASSIC_QUERY, "refId": name})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NATURAL_ASC)
        .multi(True)
    )


def _all(variable: builders.QueryVariable) -> builders.QueryVariable:
    return variable.include_all(True).all_value(".*").current(_ALL)


_PAGE = f'<a href="/d/{NODE}?var-instance={{{{instance}}}}">Node {{{{instance}}}}</a>'
# Without http.public_url the label is empty, and nothing is shown.
_LINK = '<a href="{{link}}">{{link}}</a>'


def marks_of_agents() -> list[builders.AnnotationQuery]:
    """Return the marks of the chosen agents."""
    return [_anomalies(anomalies()), _captures()]


def marks_of_jobs() -> list[builders.AnnotationQuery]:
    """Return the marks of the chosen jobs and of their devices.

    They include captures of the agents that see the jobs.
    """
    of_device = series("anomaly_info", AGENT, 'training_job=""', 'uuid!=""')
    devices = f"{of_device} and on (cluster, instance, uuid) {ranks_by_device()}"
    there = f" and on ({PLACE}) {series('rank_info', JOB)}"
    return [_anomalies(f"{anomalies(OF_JOB)} or {devices}"), _captures(there)]


def _anomalies(promql: str) -> builders.AnnotationQuery:
    title, text = "{{kind}} ({{severity}})", f"{{{{summary}}}}<br>{_LINK}"
    return _from_metrics("Anomalies", "red", promql, title, text)


def _captures(of: str = "") -> builders.AnnotationQuery:
    promql = grown(series("captures_total"), WINDOW) + of
    title, text = "Capture: {{outcome}}", "{{kind}}, {{trigger}}"
    return _from_metrics("Captures", "blue", promql, title, text)


def _from_metrics(
    name: str, color: str, promql: str, title: str, text: str
) -> builders.AnnotationQuery:
    query = prometheus.Dataquery().expr(promql).range().ref_id(name).datasource(SOURCE)
    return (
        builders.AnnotationQuery()
        .name(name)
        .datasource(SOURCE)
        .enable(True)
        .icon_color(color)
        .expr(promql)
        .target(query)
        .title_format(title)
        .text_format(f"{text}<br>{_PAGE}")
        .tag_keys("kind")
    )
