"""Marks over time: anomalies and captures, from the metrics and from what the daemon writes.

With ``exporters.grafana`` configured the daemon writes an annotation for each anomaly and capture,
with a link to its report. From the metrics the same is known without a link to the one report: the
mark links to the dashboard of the agent's node.
"""

from __future__ import annotations

from typing import cast

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models.common import DataSourceRef
from grafana_foundation_sdk.models.dashboard import AnnotationTarget

from warpwatch_dashboards.job_queries import ranks_by_device
from warpwatch_dashboards.links import NODE, TAG
from warpwatch_dashboards.queries import AGENT, JOB, PLACE, WINDOW, grown, series
from warpwatch_dashboards.variables import SOURCE

_PAGE = f'<a href="/d/{NODE}?var-instance={{{{instance}}}}">Node {{{{instance}}}}</a>'


def of_agents() -> list[builders.AnnotationQuery]:
    """Return the marks of the chosen agents; Grafana's own annotations have no agent."""
    return [_anomalies(series("anomaly_info")), _captures(), _written()]


def of_jobs() -> list[builders.AnnotationQuery]:
    """Return the marks of the chosen jobs and of their devices.

    They include captures of the agents that see the jobs, and reports that name a job.
    """
    of_job = series("anomaly_info", AGENT, 'training_job=~"$job"')
    of_device = series("anomaly_info", AGENT, 'training_job=""', 'uuid!=""')
    devices = f"{of_device} and on (cluster, instance, uuid) {ranks_by_device()}"
    there = f" and on ({PLACE}) {series('rank_info', JOB)}"
    return [_anomalies(f"{of_job} or {devices}"), _captures(there), _written("job:$job")]


def _anomalies(promql: str) -> builders.AnnotationQuery:
    return _from_metrics("Anomalies", "red", promql, "{{kind}} ({{severity}})", "{{summary}}")


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


def _written(*tags: str) -> builders.AnnotationQuery:
    query = (
        builders.AnnotationQuery()
        .name("Reports")
        .datasource(DataSourceRef("grafana", "-- Grafana --"))
        .enable(True)
        .icon_color("purple")
    )
    # The builder expects a data source, which Grafana's own annotations lack.
    target = AnnotationTarget(limit=200, match_any=False, tags=[TAG, *tags], type_val="tags")
    query.build().target = cast(Dataquery, target)
    return query
