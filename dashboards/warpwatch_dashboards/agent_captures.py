"""The row of *Warpwatch itself* about captures."""

from __future__ import annotations

from warpwatch_dashboards.page import Row
from warpwatch_dashboards.panels import EMPTY_WHEN_HEALTHY, bars, graph
from warpwatch_dashboards.queries import NODE_LEGEND, PLACE, Query, grown, rate, series, total
from warpwatch_dashboards.tables import Column, table

_ASKED = total("kind, trigger, outcome", series("captures_total"))
_RECENT = total("outcome", grown(series("captures_total"), "$__range"))
_PROBLEMS = total("problem", grown(series("capture_problems_total"), "$__range"))
_ALERTS = total("outcome", grown(series("alerts_received_total"), "$__range"))
CAPTURES_ROW = Row(
    "Captures",
    [
        table(
            "Captures since the agents' start",
            "Captures asked for, by whom, and what became of them: outcomes that begin with "
            f"refused say which limit of the policy held. {EMPTY_WHEN_HEALTHY}",
            [Column(_ASKED, "Captures")],
            width=8,
        ),
        bars(
            "Outcomes",
            f"What became of the captures of the time shown. {EMPTY_WHEN_HEALTHY}",
            Query(_RECENT, "{{outcome}}"),
        ),
        bars(
            "Problems of traces",
            "What traces lacked when they were verified: no kernels, wrong steps, unreadable. "
            f"{EMPTY_WHEN_HEALTHY}",
            Query(_PROBLEMS, "{{problem}}"),
        ),
        graph(
            "Captures in the store",
            "Captures that agents keep, the ten with the most; retention by age, count and size "
            "removes the oldest.",
            Query(f"topk(10, {total(PLACE, series('store_captures'))})", NODE_LEGEND),
        ),
        graph(
            "Size of the store",
            "Bytes on disk of the ten largest stores, up to store.max_bytes (5 GiB).",
            Query(f"topk(10, {total(PLACE, series('store_bytes'))})", NODE_LEGEND),
            unit="bytes",
        ),
        graph(
            "What captures cost",
            "Seconds of one rank a second that captures cost: the steps that started, recorded and "
            f"exported them, less what these used to take. {EMPTY_WHEN_HEALTHY}",
            Query(total("kind", rate(series("capture_cost_seconds_total"))), "{{kind}}"),
            unit="percentunit",
            width=12,
        ),
        bars(
            "Alerts received",
            "Alerts that webhooks brought in the time shown, by what became of them: captured, or "
            f"why not. {EMPTY_WHEN_HEALTHY}",
            Query(_ALERTS, "{{outcome}}"),
            width=12,
        ),
    ],
    width=4,
)
