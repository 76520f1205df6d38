"""Nodes with their GPUs: those in trouble first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from warpwatch_runtime.quantities import NO_VALUE, plural, seconds, text
from warpwatch_serving.page import devices
from warpwatch_serving.page.findings import is_late
from warpwatch_telemetry.anomalies import sentence
from warpwatch_telemetry.samples import DeviceSample, SourceHealth
from warpwatch_telemetry.state import State

# Rows, unless all are asked for: as many of those in trouble, and of all.
MAX_NODES, MIN_NODES = 20, 10
MAX_GPUS = 32
# Whether it is up, how late it is, whether no anomaly is there and no GPU is in trouble.
Place = tuple[bool, float, bool, bool]
WELL: Place = (True, 0.0, True, True)


@dataclass(frozen=True, slots=True)
class Gpu:
    """tone: down, hot, busy or idle."""

    tone: str
    title: str


def listed(state: State) -> list[tuple[SourceHealth, list[Gpu]]]:
    """Return lost and late nodes first, then nodes with an anomaly or a GPU in trouble."""
    named = troubled(state)
    found: dict[str, list[DeviceSample]] = {}
    for sample in state.devices:
        found.setdefault(sample.source, []).append(sample)
    nodes = [(one, gpus(found.get(one.name, ()), state.time)) for one in state.sources]
    return sorted(nodes, key=lambda node: (_place(node, named), node[0].name))


def _place(node: tuple[SourceHealth, Sequence[Gpu]], named: Collection[str]) -> Place:
    health, of_node = node
    late_s = health.lag_s or 0.0 if is_late(health) else 0.0
    is_hot = any(gpu.tone in ("down", "hot") for gpu in of_node)
    return health.up, -late_s, health.name not in named, not is_hot


def shown(nodes: Sequence[tuple[SourceHealth, list[Gpu]]], named: Collection[str]) -> int:
    """Return how many of the sorted nodes are shown: those in trouble, and a few of the others."""
    in_trouble = sum(1 for node in nodes if _place(node, named) != WELL)
    return min(len(nodes), MAX_NODES, max(in_trouble, MIN_NODES))


def troubled(state: State) -> set[str]:
    return {one.node for one in state.anomalies if one.end_time is None and one.node}


def needing_service(state: State) -> list[str]:
    """Return a sentence for each GPU that needs a reset, reboot or replacement, oldest first."""
    active = (one for one in state.anomalies if one.end_time is None)
    found = [one for one in active if one.kind == "device_needs_service"]
    return [sentence(one) for one in sorted(found, key=lambda one: one.time)]


def gpus(samples: Sequence[DeviceSample], now: float) -> list[Gpu]:
    return [_gpu(sample, now) for sample in samples]


def _gpu(sample: DeviceSample, now: float) -> Gpu:
    device, values = sample.device, sample.values
    name = f"{device.index}: {text(device.uuid, 48)}"
    if not sample.up:
        return Gpu("down", f"{name} cannot be read: {text(sample.reason)}")
    use, heat = devices.utilization(values), devices.temperature(values)
    limited, xids = devices.throttling(values), devices.xids(values, now)
    facts = ", ".join([use.shown, heat.shown, devices.power(values).shown, *xids])
    if limited.shown not in ("none", NO_VALUE):
        facts += f", throttled by {limited.shown}"
    hot = heat.hot or limited.hot or bool(xids)
    busy = use.filled is not None and use.filled >= 5
    return Gpu("hot" if hot else "busy" if busy else "idle", f"{name}: {facts}")


def ranks(state: State) -> Mapping[str, int]:
    """Return the running ranks by node."""
    return Counter(rank.host for rank in state.ranks if rank.status in ("running", "stopped"))


def how(health: SourceHealth) -> str:
    if not health.up:
        return f"away: {text(health.reason) or 'no reason known'}"
    late = f"{seconds(health.lag_s)} behind"
    refused = f" · {plural(health.errors, 'line')} refused" if health.errors else ""
    # The reason of an agent that is late is that it is.
    reason = "" if is_late(health) else text(health.reason)
    return " · ".join(filter(None, (late, reason))) + refused


def tone(health: SourceHealth) -> str:
    return "down" if not health.up else "late" if is_late(health) else "up"
