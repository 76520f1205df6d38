"""Each fault of a device opens its kind alone, until its end; healthy devices open nothing."""

import math
from collections.abc import Iterable, Iterator, Mapping

import pytest
from msgspec.structs import replace

from tests.cases import cases
from tests.detection.gpus import JOB, Fault, Metrics, Node, key
from tests.detection.streams import EPOCH_S, alone, detection, opened
from warpwatch_daemon.config import Config
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detectors import DETECTORS
from warpwatch_detection.engine import Detection
from warpwatch_detection.ranks import RankDevices
from warpwatch_telemetry.anomalies import DEVICE_KINDS, EVENT_KINDS, Anomaly
from warpwatch_telemetry.catalogue import series_key
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import DeviceReading, End, RankSeen, Record

CASES = cases(__file__)
NONE: Mapping[str, float] = {}
HOLD_S = Config().anomalies.hold_s


def only(found: Iterable[Anomaly]) -> Anomaly:
    (anomaly,) = found
    return anomaly


def run(node: Node, engine: Detection, fault: Fault, seconds: float) -> list[Anomaly]:
    assert opened(engine, [*node.seen(), *node.readings(130)]) == []
    return opened(engine, node.readings(seconds, fault))


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

    anomaly = only(run(node, engine, recorded, within_s))
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


@pytest.mark.parametrize(("reason", "gpus"), [("no_permission", 1), ("", 1), ("driver", 1)])
def test_a_device_that_may_not_be_read_and_all_that_cannot_are_not_lost(reason, gpus):
    """Where no device can be read it is the driver."""
    node, engine = Node(gpus=gpus, broken=0), detection()
    assert opened(engine, [*node.readings(60), *node.down(300, reason)]) == []


def test_errors_of_the_devices_life_count_where_no_driver_counts_its_own():
    node, engine = Node(), alone("ecc_uncorrectable")
    without = (key("ecc_errors_total", "uncorrected"),)
    opened(engine, node.readings(20, lambda *_: {}, without=without))
    for label, kinds in (("corrected", []), ("uncorrected", ["ecc_uncorrectable"])):
        errors = fault_of({f"ecc_aggregate_errors_total{{type={label}}}": 1.0}, after_s=5)
        found = opened(engine, node.readings(20, errors, without=without))
        assert [anomaly.kind for anomaly in found] == kinds


def test_bad_rows_that_wait_are_one_anomaly_however_short_events_are_held():
    node, engine = Node(), Detection(DetectionConfig(), AnomaliesConfig(hold_s=20.0))
    found = only(run(node, engine, fault_of({"row_remap_pending": 1.0}, after_s=5), 300))
    assert found.id == only(engine.active).id


def test_a_gpu_that_never_comes_back_is_expected_for_a_day_and_no_longer() -> None:
    node, engine = Node(), alone("device_lost")
    opened(engine, node.readings(60))
    # The daemon was away for a week; then there are fewer GPUs, perhaps by intent.
    node.time += 7 * 86400
    back_time = node.time

    def fewer(seconds: float) -> Iterable[Record]:
        return (r for r in node.readings(seconds, interval_s=60) if r.device != node.uuid)

    found = only(opened(engine, fewer(600)))
    assert (found.kind, found.device) == ("device_lost", node.uuid)
    assert opened(engine, fewer(86400 - 700)) == []
    assert [a.id for a in engine.active] == [found.id]
    assert opened(engine, fewer(700)) == []
    assert engine.active == ()
    ended = only(engine.history)
    assert ended.end_time == pytest.approx(back_time + 86400, abs=300)


def test_a_gpu_whose_readings_stop_while_others_go_on_is_lost_each_time() -> None:
    node, engine = Node(), alone("device_lost")
    opened(engine, node.seen())
    # Readings once in 100 s are no silence at first.
    for silence in ("45 s", "660 s"):
        assert opened(engine, node.readings(60)) == []
        assert not engine.active
        # Less than a day, and twice that is more.
        readings = (*node.readings(60), *node.readings(50_000, interval_s=100))
        anomaly = only(opened(engine, (r for r in readings if r.device != node.uuid)))
        assert (anomaly.kind, anomaly.rank) == ("device_lost", 1)
        assert f"has given no reading for {silence}" in anomaly.summary


@pytest.mark.parametrize("interval_s", [60.0, 61.0, 300.0])
def test_devices_that_are_read_rarely_are_not_silent_and_their_faults_are_found(interval_s):
    node, engine = Node(), detection()
    slow = {"pcie_link_width_lanes": 8.0}
    for values, kinds in ((NONE, []), (slow, ["pcie_degraded"]), (NONE, [])):
        fault = fault_of(values)
        opened(engine, node.readings(200 * interval_s, fault, interval_s=interval_s))
        assert [one.kind for one in engine.active] == kinds
    assert len(engine.history) == 1


def test_a_daemon_that_was_away_does_not_take_devices_for_lost() -> None:
    node, engine = Node(), detection()
    opened(engine, node.readings(60))
    node.time += 3600
    # One is slower to be read again than the others.
    first = (r for r in node.readings(20) if r.device != node.uuid)
    assert opened(engine, [*first, *node.readings(60)]) == []


def swapped(node: Node, seconds: float) -> Iterable[Record]:
    """Another GPU is where the broken one was."""
    for r in node.readings(seconds):
        yield DeviceReading(r.time, "GPU-new" if r.device == node.uuid else r.device, r.metrics)


@pytest.mark.parametrize("was_lost", [False, True])
def test_a_gpu_that_was_replaced_and_a_mig_device_that_was_removed_are_not_lost(was_lost):
    node, engine = Node(), detection()
    mig = [DeviceReading(node.time + second, "MIG-1", {}) for second in range(60)]
    opened(engine, [*node.readings(60), *mig])
    if was_lost:
        assert only(opened(engine, node.down(60, "lost"))).kind == "device_lost"
    assert opened(engine, swapped(node, 200)) == []
    assert not engine.active


def test_the_devices_that_a_detector_remembers_are_bounded() -> None:
    for kind in DEVICE_KINDS:
        detector = DETECTORS[kind](DetectionConfig(), AnomaliesConfig(), RankDevices())
        for number in range(300):
            detector.observe(DeviceReading(EPOCH_S, f"GPU-{number}", {}))
        assert len(detector.state.devices) == 256
        assert "GPU-299" in detector.state.devices


def test_of_several_xids_the_first_of_the_worst_is_found() -> None:
    node, engine = Node(), alone("xid")

    def fault(since_s: float, values: Metrics) -> Metrics:
        xids = {31: 5, 74: 10, 79: 15, 13: 20}
        return {key("xid_errors_total", str(n)): 1 for n, at in xids.items() if since_s >= at}

    first = only(run(node, engine, fault, 30))
    assert first.severity == "warning"
    assert first.summary == "XID 31 (Memory page fault); look at the job"
    assert (first.gpu, first.first_summary) == (1, first.summary)
    now = only(engine.active)
    assert (now.id, now.severity, now.value) == (first.id, "critical", 74.0)
    # A label has the XID that made it critical, and does not follow each one after it.
    assert now.summary == f"{now.first_summary.removesuffix('; then XID 31')}; then XID 31, 79, 13"
    assert now.first_summary.startswith("XID 74 (NVLink")


def test_an_xid_of_a_program_that_was_killed_needs_no_one() -> None:
    killed = fault_of({"xid_errors_total{xid=45}": 1.0}, after_s=5)
    assert run(Node(), detection(), killed, 60) == []
    engine = detection(xid={"min_severity": "info"})
    assert only(run(Node(), engine, killed, 60)).severity == "info"


def test_the_same_xid_again_is_the_same_anomaly_for_longer() -> None:
    node, engine = Node(), detection()

    def fault(since_s: float, values: Metrics) -> Metrics:
        return {key("xid_errors_total", "94"): 1.0 + (since_s >= 100)}

    first = only(run(node, engine, fault, 150))
    kept = {key("xid_errors_total", "94"): 2.0}
    assert opened(engine, node.readings(500, lambda *_: kept, interval_s=5.0)) == []
    assert only(engine.active).id == first.id
    opened(engine, node.readings(60, lambda *_: kept))
    ended_after_s = (only(engine.history).end_time or 0.0) - first.time
    assert ended_after_s == pytest.approx(100 + HOLD_S, abs=2)


def test_counts_that_were_there_before_are_no_news() -> None:
    node, engine = Node(), detection()
    assert opened(engine, node.readings(100, fault_of(CASES["old"]))) == []
    # The driver is loaded again and counts from 0.
    assert opened(engine, node.readings(100)) == []


@pytest.mark.parametrize(("kind", "count", "totals", "values"), CASES["together"])
def test_errors_are_counted_together_until_ten_minutes_without_one(kind, count, totals, values):
    detector = DETECTORS[kind](DetectionConfig(), AnomaliesConfig(), RankDevices())
    readings = [DeviceReading(EPOCH_S + at, "GPU-0", metrics({count: n})) for at, n in totals]
    assert [found.value for one in readings for found in detector.observe(one)] == values


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


def test_memory_in_use_without_a_rank_is_found_with_least_severity():
    node, engine = Node(gpus=1, broken=0), detection()
    (anomaly,) = opened(engine, node.readings(700, load=0.0, interval_s=5.0))
    assert (anomaly.kind, anomaly.severity, anomaly.rank) == ("device_idle", "info", None)
    assert anomaly.summary.startswith("nothing has run on the GPU for 10 min, while a process")
    # One kernel now and then does not count as work.
    idle = anomaly.id
    for _ in range(5):
        opened(engine, node.readings(30, load=0.0))
        opened(engine, node.readings(2, load=0.5))
    assert [a.id for a in engine.active] == [idle]


@pytest.mark.parametrize(("kind", "severity"), [("train", "warning"), ("serve", "info")])
def test_a_rank_uses_its_gpu_until_it_ends(kind, severity):
    node, engine = Node(gpus=1, broken=0), detection()
    opened(engine, [replace(rank, kind=kind) for rank in node.seen()])
    engine.feed(RankSeen(node.time, JOB, 0, 1, kind=kind))
    free: Metrics = {key("memory_used_bytes"): 0.0}
    opened(engine, node.readings(700, lambda *_: free, load=0.0, interval_s=5.0))
    (anomaly,) = engine.active
    assert (anomaly.kind, anomaly.severity) == ("device_idle", severity)
    assert "rank 0 of llama is on it and 0 %" in anomaly.summary
    engine.feed(End(node.time, JOB, 0))
    opened(engine, node.readings(20, lambda *_: free, load=0.0))
    assert not engine.active


def test_a_throttle_of_a_gpu_that_is_not_read_is_over_after_ten_minutes():
    node, engine = Node(), alone("thermal_throttle")
    throttled = fault_of(counts={"throttle_seconds_total{reason=hw_thermal}": 1})
    opened(engine, [*node.readings(60), *node.readings(60, throttled)])
    for seconds, active in ((590, 1), (20, 0)):
        opened(engine, node.down(seconds, "lost"))
        assert len(engine.active) == active


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


def test_readings_that_say_nothing_end_nothing_and_raise_nothing():
    """As those of a second source, which knows little of the device."""
    node, engine = Node(), detection()
    slow: Metrics = {key("pcie_link_width_lanes"): 4.0}

    def both() -> Iterator[DeviceReading]:
        for reading in node.readings(150, lambda *_: slow):
            yield reading
            yield DeviceReading(reading.time + 0.3, reading.device, {key("power_watts"): 300.0})

    assert [a.kind for a in opened(engine, both())] == ["pcie_degraded"]
    assert len(engine.active) == 1


def test_what_can_no_longer_be_judged_is_over_after_ten_minutes():
    node, engine = Node(), detection()
    slow: Metrics = {key("pcie_link_generation"): 2.0}
    opened(engine, node.readings(150, lambda *_: slow))
    assert [a.kind for a in engine.active] == ["pcie_degraded"]
    assert opened(engine, node.readings(500, lambda *_: slow, load=None, interval_s=5.0)) == []
    assert len(engine.active) == 1
    opened(engine, node.readings(200, lambda *_: slow, load=None, interval_s=5.0))
    assert not engine.active


def test_a_level_that_flickers_around_its_limit_does_not_flap():
    node, engine = Node(), detection()
    counter = {"s": 0.0}

    def flickers(since_s: float, values: Metrics) -> Metrics:
        counter["s"] += 0.13 if since_s % 40 < 20 else 0.07
        return {key("throttle_seconds_total", "sw_thermal"): counter["s"]}

    found = opened(engine, [*node.readings(60), *node.readings(400, flickers)])
    assert [a.kind for a in found] == ["thermal_throttle"]
