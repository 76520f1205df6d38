"""Each fault of a device raises its kind alone, with its device and rank, and its end closes it."""

import random
from collections.abc import Iterable

import msgspec
import pytest

from tests.detection.gpus import JOB, Fault, Metrics, Node, key
from tests.detection.streams import alone, detection, opened
from warpwatch_daemon.config import Config
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detectors import DETECTORS
from warpwatch_detection.engine import Detection
from warpwatch_detection.ranks import RankDevices
from warpwatch_telemetry.anomalies import DEVICE_KINDS, EVENT_KINDS, Anomaly
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import DeviceReading, PortReading, Record

HOLD_S = Config().anomalies.hold_s


def only(found: Iterable[Anomaly]) -> Anomaly:
    (anomaly,) = found
    return anomaly


def run(node: Node, engine: Detection, fault: Fault, seconds: float) -> list[Anomaly]:
    assert opened(engine, [*node.seen(), *node.readings(130)]) == []
    return opened(engine, node.readings(seconds, fault))


def throttled(reason: str, share: float) -> Fault:
    def fault(since_s: float, values: Metrics) -> Metrics:
        return {key("throttle_seconds_total", reason): share * since_s}

    return fault


def after(seconds: float, name: str, *labels: str, to: float = 1.0) -> Fault:
    def fault(since_s: float, values: Metrics) -> Metrics:
        return {key(name, *labels): to} if since_s >= seconds else {}

    return fault


def slow_link(since_s: float, values: Metrics) -> Metrics:
    return {key("pcie_link_width_lanes"): 8.0}


STANDS: Fault = lambda *_: {  # noqa: E731
    key("utilization_ratio"): 0.0,
    key("busy_seconds_total"): 142.0,
}


@pytest.mark.parametrize(
    ("kind", "fault", "within_s", "severity", "says"),
    [
        ("thermal_throttle", throttled("hw_thermal", 1.0), 5, "critical", "hardware cut clocks"),
        ("power_brake", after(0, "throttle_active", "hw_slowdown"), 8, "warning", "hw_slowdown"),
        ("xid", after(5, "xid_errors_total", "94"), 6, "critical", "XID 94"),
        ("device_needs_service", after(5, "recovery_action", to=2), 6, "critical", "a reboot of"),
        ("ecc_uncorrectable", after(5, "ecc_errors_total", "uncorrected"), 6, "critical", "1 new"),
        ("row_remap", after(5, "row_remap_pending"), 6, "warning", "next reset"),
        ("row_remap", after(5, "row_remap_failure"), 6, "critical", "must be replaced"),
        ("row_remap", after(5, "remapped_rows", "correctable", to=3), 6, "warning", "3 bad memory"),
        ("nvlink_error", after(5, "nvlink_errors_total", "recovery"), 6, "critical", "recovery"),
        ("nvlink_error", after(5, "nvlink_link_up", "7", to=0), 20, "critical", "1 of 18 NVLinks"),
        ("pcie_degraded", slow_link, 120, "warning", "on 8 of 16 lanes"),
        ("device_idle", STANDS, 620, "warning", "rank 1 of llama has 60 %"),
    ],
)
def test_a_fault_raises_its_kind_alone_and_ends_with_it(
    kind, fault, within_s, severity, says, golden_report
):
    node, engine = Node(), detection()
    last: dict[SeriesKey, float] = {}

    def recorded(since_s: float, values: Metrics) -> Metrics:
        last.update(fault(since_s, values))
        return last

    anomaly = only(run(node, engine, recorded, within_s))
    assert (anomaly.kind, anomaly.severity, anomaly.device) == (kind, severity, node.uuid)
    assert (anomaly.job, anomaly.rank) == (JOB, 1)
    assert says in anomaly.summary
    golden_report(engine)
    longest_s = HOLD_S + 100 if kind in EVENT_KINDS or kind == "nvlink_error" else 120
    # Counters keep their counts.
    kept = {
        name: value for name, value in last.items() if name[0].endswith(("_total", "remapped_rows"))
    }
    assert opened(engine, node.readings(longest_s, lambda *_: kept, interval_s=6.0)) == []
    assert not engine.active
    ended = only(engine.history)
    assert (ended.id, ended.severity) == (anomaly.id, severity)
    assert ended.end_time is not None


@pytest.mark.parametrize(
    ("kind", "reason", "within_s", "says"),
    [
        ("device_lost", "lost", 5, "fallen off the bus"),
        ("device_lost", "reset_required", 5, "until it is reset"),
        ("device_lost", "driver", 60, "others can"),
        ("device_stuck", "stuck", 2, "has not returned"),
    ],
)
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
        errors = after(5, "ecc_aggregate_errors_total", label)
        found = opened(engine, node.readings(20, errors, without=without))
        assert [anomaly.kind for anomaly in found] == kinds


def test_bad_rows_that_wait_are_one_anomaly_however_short_events_are_held():
    node, engine = Node(), Detection(DetectionConfig(), AnomaliesConfig(hold_s=20.0))
    assert only(run(node, engine, after(5, "row_remap_pending"), 300)).id == only(engine.active).id


def test_a_device_whose_readings_stop_while_others_go_on_is_lost() -> None:
    node, engine = Node(), detection()
    opened(engine, [*node.seen(), *node.readings(60)])
    silent = (r for r in node.readings(60) if r.device != node.uuid)
    anomaly = only(opened(engine, silent))
    assert (anomaly.kind, anomaly.rank) == ("device_lost", 1)
    assert "has given no reading for 45 s" in anomaly.summary
    opened(engine, node.readings(10))
    assert not engine.active


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


def test_a_gpu_that_is_read_again_is_expected_again() -> None:
    node, engine = Node(), alone("device_lost")
    for _ in range(2):
        opened(engine, node.readings(60))
        # Less than a day, and twice that is more.
        silent = (r for r in node.readings(50_000, interval_s=100) if r.device != node.uuid)
        assert only(opened(engine, silent)).kind == "device_lost"


def test_devices_that_are_read_once_a_minute_are_not_silent() -> None:
    node, engine = Node(), detection()
    assert opened(engine, node.readings(3600, interval_s=60.0)) == []


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
    node, engine = Node(), detection()
    assert run(node, engine, after(5, "xid_errors_total", "45"), 60) == []
    engine = detection(xid={"min_severity": "info"})
    assert only(run(Node(), engine, after(5, "xid_errors_total", "45"), 60)).severity == "info"


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
    old: Metrics = {
        key("xid_errors_total", "79"): 3.0,
        key("ecc_errors_total", "uncorrected"): 12.0,
        key("remapped_rows", "uncorrectable"): 4.0,
        key("nvlink_errors_total", "replay"): 9.0,
        key("pcie_replay_total"): 70_000.0,
        key("throttle_seconds_total", "hw_thermal"): 86_400.0,
    }
    node, engine = Node(), detection()
    assert opened(engine, node.readings(100, lambda *_: old)) == []
    # The driver is loaded again and counts from 0.
    assert opened(engine, node.readings(100)) == []


def test_errors_that_are_counted_after_the_driver_was_loaded_again_are_news() -> None:
    node, engine = Node(), detection()
    count = key("ecc_errors_total", "uncorrected")
    opened(engine, node.readings(60, lambda *_: {count: 12.0}))
    anomaly = only(opened(engine, node.readings(60, lambda *_: {count: 2.0})))
    assert (anomaly.kind, anomaly.value) == ("ecc_uncorrectable", 2.0)


def test_whatever_devices_say_is_judged_and_remembered() -> None:
    """Any part of the series, any number, any order of time."""
    chance, node = random.Random(7), Node()
    names = [*next(node.readings(1)).metrics, key("xid_errors_total", "x"), key("strange")]
    reasons = ("lost", "stuck", "driver", "no_permission", "reset_required", "")
    config = (DetectionConfig(), AnomaliesConfig(), RankDevices())
    detectors = [DETECTORS[kind](*config) for kind in DEVICE_KINDS]
    for _ in range(700):
        node.time += chance.choice((0.0, 0.5, 1.0, 1.0, 30.0, 700.0, -5.0))
        reported = {
            n: chance.choice((0, 1, 2, 0.3, 1e9, -1.0)) for n in names if chance.random() < 0.7
        }
        uuid = chance.choice(("GPU-a", "MIG-c", *2 * [f"unknown-{chance.random()}"]))
        up = chance.random() < 0.8
        reading = DeviceReading(node.time, uuid, reported, up, "" if up else chance.choice(reasons))
        for detector in detectors:
            results = [*detector.observe(reading)]
            if detector.waits and detector.state.deadline <= node.time:
                results += detector.expire(detector.state.deadline)
            assert all(result.device for result in results)
    for detector in detectors:
        state = msgspec.msgpack.encode(detector.state)
        assert msgspec.msgpack.decode(state, type=detector.state_form) == detector.state
        assert len(state) < 2_000 * len(detector.state.devices) + 100
        assert all(status.text for status in detector.statuses())
    assert max(len(detector.state.devices) for detector in detectors) == 256


def test_every_kind_says_how_it_sees_every_device() -> None:
    node, config = Node(), (DetectionConfig(), AnomaliesConfig(), RankDevices())
    for kind in DEVICE_KINDS:
        detector = DETECTORS[kind](*config)
        if detector.reads == (PortReading,):
            continue
        for record in node.readings(1):
            detector.observe(DeviceReading(record.time, record.device, {}, up=False, reason=""))
        assert {status.device for status in detector.statuses()} == set(node.uuids)
        for record in node.readings(200, slow_link):
            detector.observe(record)
        answers = {status.device: status for status in detector.statuses()}
        expected = "found" if kind == "pcie_degraded" else "fine"
        assert answers[node.uuid].answer == expected, kind
        assert all(len(status.text) > 10 for status in answers.values())
