"""A row of the metric catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "warpwatch_"

Kind = Literal["counter", "gauge", "histogram"]

# The identity labels that come before a metric's own, by what it describes.
IDENTITY_LABELS: dict[str, tuple[str, ...]] = {
    "device": ("gpu", "uuid", "gpu_instance", "profile"),
    "rank": ("training_job", "rank", "owner", "replica"),
    "job": ("training_job", "owner", "replica"),
    "host": (),
    "agent": (),
}

# The sources of a device's metric, the most trusted first: the first one with a value gives it.
DEVICE_PRECEDENCE = ("nvml", "dcgm", "dcgm_exporter", "simulated")

# A metric's name without prefix, and the values of its own labels in the catalogue's order.
SeriesKey = tuple[str, tuple[str, ...]]
Values = dict[SeriesKey, float]


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported metric.

    name: without the prefix ``warpwatch_``, with base unit and ``_total`` where it belongs.
    scope: key of IDENTITY_LABELS; those labels precede ``labels``.
    origin: where the value is read: an NVML call or field, /proc, the rendezvous.
    """

    name: str
    kind: Kind
    help: str
    scope: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    origin: str = ""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def all_labels(self) -> tuple[str, ...]:
        return IDENTITY_LABELS[self.scope] + self.labels
