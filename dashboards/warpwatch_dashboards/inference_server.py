"""*Inference server*: how long its users wait, what an iteration takes, and what holds it up.

Most of its panels are the lines of server_panels.csv.
"""

from __future__ import annotations

from warpwatch_dashboards import links, variables
from warpwatch_dashboards.page import Page, Row
from warpwatch_dashboards.panel_table import read_panels
from warpwatch_dashboards.panels import anomalies_now, newest_diagnosis
from warpwatch_dashboards.queries import JOB


def page() -> Page:
    panels = read_panels("server_panels.csv", {"rank": JOB, "job": JOB})
    share = "Share of the iterations that each finding of the newest capture explains."
    why = Row("Why", [newest_diagnosis(share), anomalies_now("server", width=16)])
    return Page(
        uid=links.INFERENCE_SERVER,
        title="Warpwatch / Inference server",
        description="One served model over all its replicas: latencies, iterations, KV cache.",
        variables=[*variables.of_agents(), variables.namespace(), variables.job()],
        annotations=variables.marks_of_jobs(),
        rows=[*(Row(title, of_row) for title, of_row in panels.items()), why],
    )
