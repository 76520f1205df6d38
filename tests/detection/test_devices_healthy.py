"""Healthy devices of all kinds open nothing; missing values are not evaluated."""

from collections.abc import Iterator

import pytest

from tests.detection.gpus import JOB, Fault, Metrics, Node, key
from tests.detection.streams import detection, opened
from warpwatch_telemetry.records import DeviceReading, End, Record


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


HABITS: dict[str, Fault] = {
    "power is capped": lambda since_s, _: {
        key("throttle_seconds_total", "sw_power_cap"): since_s,
        key("violation_seconds_total", "power"): since_s,
        key("throttle_active", "sw_power_cap"): 1.0,
        key("clock_hertz", "sm"): 1.1e9,
    },
    "clocks are set": lambda *_: {
        key("throttle_active", "application_clocks"): 1.0,
        key("clock_hertz", "sm"): 1.2e9,
    },
    # It was read while the GPU was idle, and stands for half a minute of load.
    "the link sleeps": lambda since_s, _: (
        {key("pcie_link_generation"): 1.0} if since_s < 30 else {}
    ),
    "few CRC errors": lambda since_s, _: {key("nvlink_errors_total", "crc_flit"): since_s // 2},
    "few replays": lambda since_s, _: {key("pcie_replay_total"): since_s // 15},
    "short peaks": lambda since_s, _: {key("throttle_seconds_total", "sw_thermal"): since_s // 60},
    "it is warm": lambda *_: {key("temperature_celsius", "gpu"): 80.0},
    # The counter is known, so that a state that flickers does not count.
    "a state flickers": lambda since_s, _: {key("throttle_active", "sw_thermal"): since_s % 3 > 0},
}


@pytest.mark.parametrize("habit", HABITS)
def test_what_is_normal_is_no_anomaly(habit):
    node, engine = Node(), detection()
    assert opened(engine, [*node.seen(), *node.readings(150)]) == []
    assert opened(engine, node.readings(200, HABITS[habit])) == []


def test_an_idle_gpu_may_have_a_slow_link_and_an_unused_one_may_be_idle():
    node, engine = Node(), detection()
    idle: Metrics = {key("pcie_link_generation"): 1.0}
    assert opened(engine, node.readings(300, lambda *_: idle, load=0.0)) == []
    node, engine = Node(), detection()
    assert opened(engine, node.readings(1200, load=None, interval_s=5.0)) == []


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


def test_a_rank_uses_its_gpu_until_it_ends():
    node, engine = Node(gpus=1, broken=0), detection()
    opened(engine, node.seen())
    free: Metrics = {key("memory_used_bytes"): 0.0}
    opened(engine, node.readings(700, lambda *_: free, load=0.0, interval_s=5.0))
    (anomaly,) = engine.active
    assert (anomaly.kind, anomaly.severity) == ("device_idle", "warning")
    assert "rank 0 of llama has 0 %" in anomaly.summary
    engine.feed(End(node.time, JOB, 0))
    opened(engine, node.readings(20, lambda *_: free, load=0.0))
    assert not engine.active


def test_without_the_counter_the_state_counts():
    node, engine = Node(), detection()
    counter = key("throttle_seconds_total", "hw_thermal")
    active: Metrics = {key("throttle_active", "hw_thermal"): 1.0}
    opened(engine, node.readings(60, without=(counter,)))
    found = opened(engine, node.readings(10, lambda *_: active, without=(counter,)))
    assert [a.kind for a in found] == ["thermal_throttle"]


def test_margins_stand_in_for_thresholds():
    node, engine = Node(), detection()
    without = (key("temperature_threshold_celsius", "slowdown"),)
    close: Metrics = {
        key("temperature_margin_celsius"): 1.0,
        key("temperature_margin_threshold_celsius", "slowdown"): -2.0,
        key("temperature_celsius", "gpu"): 84.0,
    }
    assert opened(engine, node.readings(100, without=without)) == []
    (anomaly,) = opened(engine, node.readings(80, lambda *_: close, without=without))
    assert (anomaly.kind, anomaly.value, anomaly.baseline) == ("overheating", 84.0, 87.0)


HOT_C, COUNTED_S = key("temperature_celsius", "gpu"), key("throttle_seconds_total", "sw_thermal")
CLOCK, HW_STATE = key("clock_hertz", "sm"), key("throttle_active", "hw_thermal")
SW_STATE, CAPPED = key("throttle_active", "sw_thermal"), key("throttle_active", "sw_power_cap")
SET_CLOCKS = key("throttle_active", "application_clocks")


@pytest.mark.parametrize(
    ("before", "values", "kind", "says"),
    [
        # As in the field: the violation counter stands still.
        (
            {},
            {HOT_C: 91, HW_STATE: 1, key("throttle_active", "hw_slowdown"): 1, CLOCK: 0.9e9},
            "thermal_throttle",
            "at 91 °C; the SM clock is 900 MHz of 1980 MHz; the driver: hw_thermal counter 0%, "
            "state 93%, sw_thermal counter 0%, state 0%",
        ),
        ({}, {SW_STATE: 1}, "thermal_throttle", "sw_thermal counter 0%, state 93%"),
        ({}, {HOT_C: 91, CLOCK: 0.9e9}, "thermal_throttle", "too hot, and the SM clock low under"),
        ({}, {HOT_C: 88, SW_STATE: 1, COUNTED_S: 1e3, CLOCK: 1.2e9}, "thermal_throttle", "at 88 °"),
        # The clock that was set explains it.
        ({}, {HOT_C: 91, CLOCK: 0.9e9, CAPPED: 1}, "overheating", "4 °C above the 87 °C"),
        ({}, {HOT_C: 91, CLOCK: 0.9e9, SET_CLOCKS: 1}, "overheating", "is at 91 °C"),
        ({CLOCK: 0.9e9}, {HOT_C: 91, CLOCK: 0.9e9}, "overheating", "is at 91 °C"),
    ],
)
def test_one_witness_of_heat_is_enough_and_a_set_clock_is_none(before, values, kind, says):
    node, engine = Node(), detection()
    opened(engine, node.readings(150, lambda *_: before))
    early = opened(engine, node.readings(33, lambda *_: values))
    found = [*early, *opened(engine, node.readings(200, lambda *_: values))]
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
