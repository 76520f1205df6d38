"""The Prometheus rules in rules/, read: what docs, Grafana's files and tests are made from.

``python -m warpwatch_dashboards.rule_files FILE`` rewrites the table of docs/alerts.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "rules"
RECORDING = "recording.yaml"
# In the order in which people read them.
ALERTING = ("anomalies.yaml", "fleet.yaml", "agent.yaml")

BEGIN, END = "<!-- alerts:begin -->", "<!-- alerts:end -->"


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert rule. ``wait`` is its ``for``."""

    name: str
    expression: str
    wait: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]

    @property
    def severity(self) -> str:
        return self.labels["severity"]

    @property
    def runbook(self) -> str:
        """Its file; the alerts of one kind share theirs."""
        return self.annotations["runbook_url"].rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording rule."""

    name: str
    expression: str


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated together, every ``interval``."""

    name: str
    interval: str
    alerts: tuple[Alert, ...] = ()
    recordings: tuple[Recording, ...] = ()


def read(file: str) -> tuple[Group, ...]:
    """Return the groups of one file of rules/."""
    document = yaml.safe_load((FOLDER / file).read_text())
    return tuple(_group(group) for group in document["groups"])


def alerts() -> tuple[Alert, ...]:
    """Return all alerts, in the order of their files."""
    return tuple(alert for file in ALERTING for group in read(file) for alert in group.alerts)


def recordings() -> tuple[Recording, ...]:
    """Return all recording rules."""
    return tuple(rule for group in read(RECORDING) for rule in group.recordings)


def _group(group: Mapping[str, Any]) -> Group:
    rules = group["rules"]
    return Group(
        name=group["name"],
        interval=group["interval"],
        alerts=tuple(_alert(rule) for rule in rules if "alert" in rule),
        recordings=tuple(Recording(r["record"], r["expr"]) for r in rules if "record" in r),
    )


def _alert(rule: Mapping[str, Any]) -> Alert:
    return Alert(rule["alert"], rule["expr"], rule["for"], rule["labels"], rule["annotations"])


def table() -> str:
    """Return alert, severity and ``for`` of all alerts as Markdown."""
    return "".join(_rows())


def _rows() -> Iterable[str]:
    yield "| alert | severity | for |\n"
    yield "|---|---|---|\n"
    for alert in alerts():
        yield f"| [{alert.name}](runbooks/{alert.runbook}) | {alert.severity} | {alert.wait} |\n"


def into_document(document: str) -> str:
    """Rewrite the table between the markers. Raises ValueError without markers."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{BEGIN} … {END} is not there")
    return f"{before}{begin}\n{table()}{end}{after}"


if __name__ == "__main__":
    _document = Path(sys.argv[1])
    _document.write_text(into_document(_document.read_text()))
