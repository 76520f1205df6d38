"""Every limit, as a golden file: at which size a fault that grows and shrinks is found and over."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from random import Random
from typing import Any

import pytest

from tests.detection.gpus import Metrics, Node, key
from tests.detection.streams import EPOCH_S, Job, detection, with_events
from warpwatch_detection.engine import Detection
from warpwatch_telemetry.catalogue import ERRORS
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import PortReading, RankSeen, Record, Serve

# The size of a fault, 0 to 1, and the healthy values -> the values that are different.
Faulty = Callable[[float, Metrics], Mapping[SeriesKey, float]]
SIZES_S = 400.0


def size(at: float, rises: float = SIZES_S) -> float:
    """Return 0 to 1 and to 0 again in twice ``rises``, and 0 after it."""
    return max(0.0, min(at, 2 * rises - at) / rises)


def course(engine: Detection, records: Iterable[tuple[float, Record]]) -> str:
    """Return a line for what is opened and closed, with the size of the fault at that moment.

    It also has what each detector said of what it had found when the fault was largest.
    """
    lines, largest, said = [], 0.0, ""
    for now, record in records:
        for change in engine.feed(record):
            one = change.anomaly
            if change.what in ("opened", "reopened", "closed"):
                lines.append(
                    f"  {change.what} at {now:.3f}: {one.kind} {one.severity} {one.rank} "
                    f"since {one.begin_step}: {one.summary}\n"
                )
        if now > largest:
            largest, said = now, ""
            if now > 0.99:
                said = "".join(
                    f"  then {kind}: {status.text}\n"
                    for kind, status in (
                        (k, s) for k, all in engine.statuses().items() for s in all
                    )
                    if status.answer == "found"
                )
    return "".join(lines) + said


def of(keyed: SeriesKey, value: Callable[[float], float]) -> Faulty:
    return lambda level, _: {keyed: value(level)}


def share(level: float, values: Metrics, keyed: SeriesKey, lost: float) -> Metrics:
    return {keyed: values[keyed] * (1 - lost * level)}


class Counted:
    """A counter that grows by ``per_second`` at the largest size of the fault."""

    def __init__(self, keyed: SeriesKey, per_second: float) -> None:
        self.keyed, self.per_second, self.total = keyed, per_second, 0.0

    def __call__(self, level: float, _: Metrics) -> Metrics:
        self.total += level * self.per_second
        return {self.keyed: self.total}


TIMED, STATE = "throttle_seconds_total", "throttle_active"
CLOCK, LOAD = key("clock_hertz", "sm"), key("utilization_ratio")
HEAT, MEMORY_HEAT = (key("temperature_celsius", sensor) for sensor in ("gpu", "memory"))
LANES, GENERATION = key("pcie_link_width_lanes"), key("pcie_link_generation")
BUSY = key("busy_seconds_total")
GROWING: dict[str, Callable[[], Faulty]] = {
    **{
        f"seconds of {reason}": partial(Counted, key(TIMED, reason), 0.4)
        for reason in ("sw_thermal", "hw_thermal", "hw_power_brake", "sw_power_cap")
    },
    **{
        f"state {reason}": partial(of, key(STATE, reason), lambda level: float(level > 0.3))
        for reason in ("sw_thermal", "hw_thermal", "hw_power_brake", "hw_slowdown")
    },
    "heat": lambda: of(HEAT, lambda level: 70 + 25 * level),
    "heat of memory": lambda: of(MEMORY_HEAT, lambda level: 70 + 40 * level),
    "heat and a low clock": lambda: (
        lambda level, values: {HEAT: 70 + 25 * level, **share(level, values, CLOCK, 0.4)}
    ),
    "clock": lambda: lambda level, values: share(level, values, CLOCK, 0.4),
    "load": lambda: lambda level, values: {**share(level, values, LOAD, 1.0), BUSY: 1e3},
    "a low clock at low load": lambda: (
        lambda level, values: {CLOCK: 0.6 * values[CLOCK], LOAD: level}
    ),
    "lanes": lambda: of(LANES, lambda level: 16 // (1 + round(3 * level))),
    "generation": lambda: of(GENERATION, lambda level: 5 - round(3 * level)),
    "a slow link at low load": lambda: lambda level, values: {LANES: 8.0, LOAD: 0.4 * level},
    "replays": lambda: Counted(key("pcie_replay_total"), 0.4),
    **{
        f"NVLink {kind}": partial(Counted, key("nvlink_errors_total", kind), most)
        for kind, most in (("crc_flit", 300), ("crc_data", 300), ("receive", 300), ("replay", 0.02))
    },
    "NVLinks that are down": lambda: (
        lambda level, _: {
            key("nvlink_link_up", str(link)): float(link >= 5 * level) for link in range(18)
        }
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_device_fault_that_grows_is_found_at_its_limit(name, golden_case):
    node, fault = Node(gpus=1, broken=0), GROWING[name]()
    engine = detection(device_idle={"after_s": 60})

    def records() -> Iterator[tuple[float, Record]]:
        yield from ((0.0, record) for record in (*node.seen(), *node.readings(200)))
        begun = node.time

        def grown(since_s: float, values: Metrics) -> Metrics:
            return fault(size(since_s), values)

        for reading in node.readings(2 * SIZES_S + 640, grown, interval_s=2.0):
            yield size(reading.time - begun), reading

    golden_case(course(engine, records()))


def test_a_fault_that_comes_at_once_is_found_and_over_after_the_hold_of_its_kind(golden_case):
    text = ""
    for name, make in GROWING.items():
        node, fault = Node(gpus=1, broken=0), make()
        engine = detection(device_idle={"after_s": 60})
        for record in (*node.seen(), *node.readings(200)):
            engine.feed(record)
        begun = node.time
        lasts = partial(lambda fault, since_s, values: fault(1.0, values), fault)
        changes = [
            f"{change.what} {change.anomaly.kind} at {record.time - begun:.0f} s"
            for record in (*node.readings(120, lasts), *node.readings(120))
            for change in engine.feed(record)
            if change.what != "updated"
        ]
        text += f"{name} for 120 s: {', '.join(changes)}\n"
    golden_case(text)


def port_readings(kind: str, most: float) -> Iterator[tuple[float, Record]]:
    counted = Counted(("network_port_errors_total", ("mlx5_0", "1", kind)), 5 * most)
    up = ("network_port_up", ("mlx5_0", "1"))
    for second in range(0, 1700, 5):
        level = size(second - 100)
        values = {up: 1.0, **counted(level, {})}
        yield level, PortReading(EPOCH_S + second, "mlx5_0/1", values)


def test_errors_of_a_network_port_that_grow_are_found_at_the_limit_of_their_type(golden_case):
    golden_case(
        "".join(
            f"{file}\n{course(detection(), port_readings(file.split('/')[1], 3 * limit or 0.01))}"
            for file, limit in ERRORS.items()
        )
    )


# The phases that get longer, and by how much of a step; level, step and rank -> a factor.
PHASES: dict[str, tuple[str, float, Callable[[float, int, int], float]]] = {
    "all ranks compute longer": ("compute", 0.4, lambda level, _, __: level),
    "one rank computes longer": ("compute", 0.4, lambda level, _, rank: level * (rank == 1)),
    "one rank is slow by turns":
        ("compute", 0.5, lambda level, step, rank: level * (rank == 1 and step // 30 % 2)),
    "all ranks wait": ("wait", 0.6, lambda level, _, __: level),
    "one rank waits": ("wait", 0.6, lambda level, _, rank: level * (rank == 1)),
    "one rank pauses":
        ("compute", 1.5, lambda level, step, rank: level * (rank == 1 and step % 25 == 5)),
    "all ranks have more and more slow steps":
        ("compute", 0.8, lambda level, step, _: Random(step).random() < 0.3 * level),
    "garbage collections":
        ("compute tell", 2.0, lambda level, step, rank: level * (rank == 0 and step % 30 == 5)),
    "communication": ("pause", 0.4, lambda level, _, __: level),
}  # fmt: skip


@pytest.mark.parametrize("shape", ["3 0.5 0.02", "2 0.1 0.05"])
@pytest.mark.parametrize("name", PHASES)
def test_steps_that_get_longer_and_shorter_are_found_at_the_limit(name, shape, golden_case):
    ranks, step_s, noise = shape.split()
    job, rises = Job(int(ranks), float(step_s), float(noise)), 400
    phases, most, factor = PHASES[name]

    def extra(phase: str) -> Callable[[int, int], float]:
        if phase not in phases.split():
            return lambda step, rank: 0.0
        return lambda step, rank: job.step_s * most * factor(size(step - 300, rises), step, rank)

    steps = job.steps(
        300 + 2 * rises + 300, compute=extra("compute"), wait=extra("wait"), pause=extra("pause")
    )

    def records() -> Iterator[tuple[float, Record]]:
        yield from ((0.0, record) for record in job.seen())
        for record in with_events(steps, extra("tell")):
            yield size(getattr(record, "step", job.step) - 300, rises), record

    golden_case(course(detection(), records()), f"{name} {shape}")


HEALTHY: dict[str, Any] = {
    "running": 8, "kv_usage": 0.5, "generated_tokens": 42, "queue": {3: 2}, "queue_s": 0.02,
    "iterations": {"decode": (10, 0.9), "mixed": (2, 0.4)}, "first_token": {9: 2},
    "first_token_s": 0.5, "inter_token": {5: 40}, "inter_token_s": 3.6,
}  # fmt: skip
IDLE: dict[str, Any] = {
    "running": 0, "iterations": {}, "inter_token": {}, "inter_token_s": 0.0, "first_token": {}
}  # fmt: skip
# The fields that differ in a server's second at a size of the fault.
SERVED: dict[str, Callable[[float], Mapping[str, Any]]] = {
    "requests that wait": lambda level: {"waiting": round(300 * level)},
    "requests that lose their place":
        lambda level: {"preemptions": round(2 * level), "kv_usage": 0.5 + level / 2},
    "tokens": lambda level: {"inter_token_s": 5.4 if level > 0.3 else 3.6},
    "tokens of requests that lost their place":
        lambda level: {"inter_token_s": 5.4, "preemptions": 5} if level > 0.3 else {},
    "first tokens": lambda level: {"first_token_s": 1.0 if level > 0.3 else 0.5},
    "first tokens of a queue":
        lambda level: {"first_token_s": 1.0, "queue_s": 0.52} if level > 0.3 else {},
    "no progress":
        lambda level: {"iterations": {}, "generated_tokens": 0} if level > 0.5 else {},
    "tokens until there are no requests":
        lambda level: {"inter_token_s": 7.2} if 0.3 < level < 0.6 else IDLE if level > 0.6 else {},
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_a_fault_of_a_server_that_grows_is_found_at_its_limit(name, golden_case):
    random = Random(1)

    def records() -> Iterator[tuple[float, Record]]:
        yield 0.0, RankSeen(EPOCH_S, "chat", 0, 1, kind="serve")
        for second in range(2500):
            level = size(second - 500, 700)
            fields = {**HEALTHY, **SERVED[name](level)}
            fields["inter_token_s"] *= random.lognormvariate(0, 0.02)
            fields["first_token_s"] *= random.lognormvariate(0, 0.02)
            yield level, Serve(EPOCH_S + second, "chat", **fields)

    golden_case(course(detection(), records()))
