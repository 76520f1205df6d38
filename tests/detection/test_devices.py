"""Each fault of a device opens its kind alone, until its end; healthy devices open nothing."""

import math
from collections.abc import Iterable, Iterator, Mapping

import pytest

from tests.cases import cases
from tests.detection.gpus import JOB, Fault, Metrics, Node
from tests.detection.streams import EPOCH_S, detection, opened
from warpwatch_daemon.config import Config
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detectors import DETECTORS
from warpwatch_detection.ranks import RankDevices
from warpwatch_telemetry.anomalies import DEVICE_KINDS, EVENT_KINDS, Anomaly
from warpwatch_telemetry.catalogue import series_key
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import DeviceReading, End, Record

CASES = cases(__file__)
NONE: Mapping[str, float] = {}
HOLD_S = Config().anomalies.hold_s


def only(found: Iterable[Anomaly]) -> Anomaly:
    (anomaly,) = found
    return anomaly


def metrics(values: Mapping[str, float]) -> dict[SeriesKey, float]:
    return {series_key(text): float(value) for text, value in values.items()}


def fault_of(
    values: Mapping[str, float] = NONE,
    counts: Mapping[str, float] = NONE,
    flickers: Mapping[str, float] = NONE,
    after_s: float = 0.0,
    until_s: float = math.inf,
) -> Fault:
    """Return a fault as devices.yaml describes it."""
    read, counted, flickering = (metrics(part) for part in (values, counts, flickers))

    def fault(since_s: float, _: Metrics) -> Metrics:
        grown = {name: since_s // each_s for name, each_s in counted.items()}
        states = {name: float(since_s % each_s > 0) for name, each_s in flickering.items()}
        return {**read, **grown, **states} if after_s <= since_s < until_s else {}

    return fault


@pytest.mark.parametrize(("kind", "fault", "found"), CASES["faults"].values(), ids=CASES["faults"])
def test_a_fault_raises_its_kind_alone_and_ends_with_it(kind, fault, found, golden_report):
    node, engine, read = Node(), detection(), fault_of(**fault)
    within_s, severity, says = found
    last: dict[SeriesKey, float] = {}

    def recorded(since_s: float, values: Metrics) -> Metrics:
        last.update(read(since_s, values))
        return last

    assert opened(engine, [*node.seen(), *node.readings(130)]) == []
    anomaly = only(opened(engine, node.readings(within_s, recorded)))
    assert (anomaly.kind, anomaly.severity, anomaly.device) == (kind, severity, node.uuid)
    assert (anomaly.job, anomaly.rank) == (JOB, 1)
    assert says in anomaly.summary
    golden_report(engine)
    longest_s = HOLD_S + 100 if kind in EVENT_KINDS or kind == "nvlink_error" else 120
    # Counters keep their counts.
    kept = {k: value for k, value in last.items() if k[0].endswith(("_total", "remapped_rows"))}
    assert opened(engine, node.readings(longest_s, lambda *_: kept, interval_s=6.0)) == []
    assert not engine.active
    ended = only(engine.history)
    assert (ended.id, ended.severity) == (anomaly.id, severity)
    assert ended.end_time is not None


@pytest.mark.parametrize(("kind", "reason", "within_s", "says"), CASES["down"])
def test_a_device_that_is_down_for_a_reason_of_its_own(kind, reason, within_s, says, golden_report):
    node, engine = Node(), detection(disabled=["device_needs_service"])
    assert opened(engine, [*node.seen(), *node.readings(60)]) == []
    anomaly = only(opened(engine, node.down(within_s, reason)))
    assert (anomaly.kind, anomaly.severity, anomaly.device) == (kind, "critical", node.uuid)
    assert anomaly.rank == 1
    assert says in anomaly.summary
    golden_report(engine)
    assert opened(engine, node.down(100, reason)) == []
    assert only(engine.active).id == anomaly.id
    assert opened(engine, node.readings(10)) == []
    assert not engine.active


def test_the_devices_that_a_detector_remembers_are_bounded() -> None:
    for kind in DEVICE_KINDS:
        detector = DETECTORS[kind](DetectionConfig(), AnomaliesConfig(), RankDevices())
        for number in range(300):
            detector.observe(DeviceReading(EPOCH_S, f"GPU-{number}", {}))
            # A found fault stays known.
            detector.state.devices[f"GPU-{number}"].hysteresis.found = number < 9
        assert len(detector.state.devices) == 256
        assert {"GPU-0", "GPU-8", "GPU-299"} <= detector.state.devices.keys()


# --- healthy devices ---


def day(node: Node) -> Iterator[Record]:
    """Training with checkpoints, light load, a break between two jobs, slow input, full load."""
    yield from node.seen()
    for _ in range(2):
        yield from node.readings(240, load=0.97)
        yield from node.readings(60, load=0.0)
    yield from node.readings(250, load=0.3)
    yield End(node.time, JOB)
    yield from node.readings(900, load=None, interval_s=3.0)
    yield from node.seen()
    for second in range(250):
        yield from node.readings(1, load=0.9 if second % 3 else 0.02)
    yield from node.readings(250, load=1.0)


@pytest.mark.parametrize("profile", ["h100", "l4"])
def test_a_healthy_course_of_load_raises_nothing(profile):
    node, engine = Node(profile, gpus=1, broken=0), detection()
    assert opened(engine, day(node)) == []


@pytest.mark.parametrize("habit", CASES["normal"])
def test_what_is_normal_is_no_anomaly(habit):
    node, engine = Node(), detection()
    assert opened(engine, [*node.seen(), *node.readings(150)]) == []
    assert opened(engine, node.readings(200, fault_of(**CASES["normal"][habit]))) == []


@pytest.mark.parametrize(("before", "values", "kind", "says"), CASES["heat"])
def test_one_witness_of_heat_is_enough_and_a_set_clock_is_none(before, values, kind, says):
    node, engine = Node(), detection()
    opened(engine, node.readings(150, fault_of(before)))
    early = opened(engine, node.readings(33, fault_of(values)))
    found = [*early, *opened(engine, node.readings(200, fault_of(values)))]
    assert [a.kind for a in found] == [kind]
    assert (early == found) == (kind == "thermal_throttle")
    assert says in found[0].summary
    assert engine.active[0].id == found[0].id
