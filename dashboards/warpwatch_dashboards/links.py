"""The dashboards' stable identifiers, and the links between them.

Links keep the time and the data source. A node is named by its agent's address: ``node`` may lack.
"""

from __future__ import annotations

from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import dashboard as models

TAG = "warpwatch"
FLEET, NODE, TRAINING_JOB, INFERENCE_SERVER, AGENT = (
    "warpwatch-fleet",
    "warpwatch-node",
    "warpwatch-training-job",
    "warpwatch-inference-server",
    "warpwatch-agent",
)

_KEEP = "${datasource:queryparam}&${cluster:queryparam}&${__url_time_range}"


@dataclass(frozen=True, slots=True)
class Link:
    """From a value to another dashboard."""

    title: str
    url: str


def bar() -> builders.DashboardLink:
    """Return a link to each dashboard of Warpwatch, at the top."""
    return (
        builders.DashboardLink("Warpwatch")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .include_vars(True)
        .keep_time(True)
    )


def node_of_row() -> Link:
    """Return the link from a row of a table with the column Agent."""
    return _link("Node", NODE, "var-instance=${__data.fields.Agent}")


def node_of_series() -> Link:
    """Return the link from a series with the label ``instance``."""
    return _link("Node", NODE, "var-instance=${__field.labels.instance}")


def job_of_row() -> Link:
    """Return the link from a row of a table with the column Job."""
    return _link("Training job", TRAINING_JOB, "var-job=${__data.fields.Job}")


def job_of_series() -> Link:
    """Return the link from a series with the label ``training_job``."""
    return _link("Training job", TRAINING_JOB, "var-job=${__field.labels.training_job}")


def _link(title: str, uid: str, chosen: str) -> Link:
    return Link(title, f"/d/{uid}?{_KEEP}&{chosen}")
