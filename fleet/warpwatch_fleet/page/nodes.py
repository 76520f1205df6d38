"""Nodes with their GPUs: those in trouble first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from warpwatch_daemon.http.agent import Watcher
from warpwatch_daemon.http.page import devices
from warpwatch_daemon.quantities import plural, seconds, text
from warpwatch_telemetry.records import DeviceReading
from warpwatch_telemetry.samples import SourceHealth
from warpwatch_telemetry.state import State

MAX_NODES = 20
MAX_GPUS = 32
# What an agent that is well is behind.
LATE_S = 3.0


@dataclass(frozen=True, slots=True)
class NodeState:
    """gpus: the newest reading of each, in the order in which they came to be known."""

    health: SourceHealth
    gpus: Sequence[DeviceReading] = field(default_factory=tuple)


class NodesWatcher(Watcher, Protocol):
    def nodes(self) -> Sequence[NodeState]: ...


@dataclass(frozen=True, slots=True)
class Gpu:
    """tone: down, hot, busy or idle."""

    tone: str
    title: str


def listed(all_nodes: Sequence[NodeState], state: State) -> list[NodeState]:
    """Those that are away or late first, then those with an anomaly or a GPU in trouble."""
    named = troubled(state)
    return sorted(
        all_nodes,
        key=lambda node: (
            node.health.up,
            node.health.duration_s < LATE_S,
            node.health.name not in named,
            not any(gpu.tone in ("down", "hot") for gpu in gpus(node, state.time)),
            node.health.name,
        ),
    )


def troubled(state: State) -> set[str]:
    return {one.node for one in state.anomalies if one.end_time is None and one.node}


def gpus(node: NodeState, now: float) -> list[Gpu]:
    return [_gpu(number, one, now) for number, one in enumerate(node.gpus[:MAX_GPUS])]


def _gpu(number: int, reading: DeviceReading, now: float) -> Gpu:
    name, values = f"{number}: {text(reading.device, 48)}", reading.metrics
    if not reading.up:
        return Gpu("down", f"{name} cannot be read: {text(reading.reason)}")
    use, heat = devices.utilization(values), devices.temperature(values)
    limited, xids = devices.throttling(values), devices.xids(values, now)
    facts = ", ".join([use.shown, heat.shown, devices.power(values).shown, *xids])
    if limited.shown != "none":
        facts += f", throttled by {limited.shown}"
    hot = heat.hot or limited.hot or bool(xids)
    busy = use.filled is not None and use.filled >= 5
    return Gpu("hot" if hot else "busy" if busy else "idle", f"{name}: {facts}")


def ranks(state: State) -> Mapping[str, int]:
    """That run, by node."""
    counts: dict[str, int] = {}
    for rank in state.ranks:
        if rank.status in ("running", "stopped"):
            counts[rank.host] = counts.get(rank.host, 0) + 1
    return counts


def how(health: SourceHealth) -> str:
    if not health.up:
        return f"away: {text(health.reason) or 'no reason known'}"
    late = f"{seconds(health.duration_s)} behind"
    refused = f" · {plural(health.errors, 'line')} not believed" if health.errors else ""
    return " · ".join(filter(None, (late, text(health.reason)))) + refused


def tone(health: SourceHealth) -> str:
    return "down" if not health.up else "late" if health.duration_s >= LATE_S else "up"
