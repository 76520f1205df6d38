"""Marks of anomalies and captures over time, from the metrics.

A mark links to the dashboard of the agent's node. With ``http.public_url`` the mark of an anomaly
also links to its page.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus

from warpwatch_dashboards.job_queries import ranks_by_device
from warpwatch_dashboards.links import NODE
from warpwatch_dashboards.queries import AGENT, JOB, PLACE, WINDOW, grown, series
from warpwatch_dashboards.variables import SOURCE

_PAGE = f'<a href="/d/{NODE}?var-instance={{{{instance}}}}">Node {{{{instance}}}}</a>'
# Without http.public_url the label is empty, and nothing is shown.
_LINK = '<a href="{{link}}">{{link}}</a>'


def of_agents() -> list[builders.AnnotationQuery]:
    """Return the marks of the chosen agents."""
    return [_anomalies(series("anomaly_info")), _captures()]


def of_jobs() -> list[builders.AnnotationQuery]:
    """Return the marks of the chosen jobs and of their devices.

    They include captures of the agents that see the jobs.
    """
    of_job = series("anomaly_info", AGENT, 'training_job=~"$job"')
    of_device = series("anomaly_info", AGENT, 'training_job=""', 'uuid!=""')
    devices = f"{of_device} and on (cluster, instance, uuid) {ranks_by_device()}"
    there = f" and on ({PLACE}) {series('rank_info', JOB)}"
    return [_anomalies(f"{of_job} or {devices}"), _captures(there)]


def _anomalies(promql: str) -> builders.AnnotationQuery:
    return _from_metrics(
        "Anomalies", "red", promql, "{{kind}} ({{severity}})", f"{{{{summary}}}}<br>{_LINK}"
    )


def _captures(of: str = "") -> builders.AnnotationQuery:
    promql = grown(series("captures_total"), WINDOW) + of
    return _from_metrics(
        "Captures", "blue", promql, "Capture: {{outcome}}", "{{kind}}, {{trigger}}"
    )


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
