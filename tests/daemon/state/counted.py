"""Reads the daemon's own metrics."""

from warpwatch_daemon.state.hub import Hub
from warpwatch_telemetry.catalogue import CATALOGUE


def counted(hub: Hub, name: str, *labels: str) -> float | None:
    row = CATALOGUE[name]
    own = dict(zip(row.labels, labels, strict=True))
    return hub.metrics.registry.get_sample_value(row.full_name, own)
