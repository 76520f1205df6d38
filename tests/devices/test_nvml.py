"""The nvml source on a fake driver with eight GPUs, round by round, and in a process of its own."""

import logging
from collections.abc import Callable

import pytest

from tests.devices.fakenvml.driver import LIBRARY
from tests.devices.nvml_by_hand import HandNvml, uuid
from warpwatch_devices.config import NvmlConfig
from warpwatch_devices.nvml import gpm
from warpwatch_devices.nvml.library import meaning_of, name_of
from warpwatch_devices.nvml.source import NvmlSource
from warpwatch_devices.source import SourceContext
from warpwatch_telemetry.samples import SourceHealth

ALL = set(range(8))
STUCK_AFTER_S, GRACE_S = 5.0, 60.0
UTILIZATION, INIT, COUNT, SAMPLE = (
    "nvmlDeviceGetUtilizationRates",
    "nvmlInitWithFlags",
    "nvmlDeviceGetCount_v2",
    "nvmlGpmSampleGet",
)
COUNTER = ("device_sm_active_ratio", ())
UPGRADED = (
    "the NVIDIA driver was upgraded under this process: kernel module and library differ; "
    "restarting picks the new library up"
)
BLOCKED = (
    "a stuck driver call prevents NVML from being restarted in this process; "
    "restarting the daemon helps"
)


class Source:
    """The source, in rounds of a second. ``failures``: why it wants the daemon to end."""

    def __init__(self, nvml: HandNvml) -> None:
        self.nvml = nvml
        self.failures: list[str] = []
        config = NvmlConfig(stuck_after_s=STUCK_AFTER_S, mismatch_grace_s=GRACE_S)
        around = SourceContext(lambda _: None, tuple, lambda: False, self.failures.append)
        clocks = {"monotonic": nvml.clock.monotonic, "wall": nvml.clock.wall}
        self.source = NvmlSource(config, around, nvml.ledger, **clocks)
        self.source.start(nvml.loops, nvml.sink)
        nvml.closing.append(self.source.close)

    def begin(self, gpus: int = 8) -> HandNvml:
        self.nvml.driver.set(gpus=gpus)
        self.nvml.rounds(3)
        assert self.nvml.up() == set(range(gpus))
        return self.nvml

    def stick(self, loop: str, function: str | None = None, gpu: int | None = None) -> None:
        self.nvml.hang(loop, function, gpu)
        self.wait(STUCK_AFTER_S + 1)

    def wait(self, seconds: float) -> None:
        step_s = 1.0 if seconds < 30 else 5.0
        self.nvml.rounds(round(seconds / step_s), step_s)

    def wait_while(self, what: Callable[[], object], at_most_s: float = 40) -> None:
        for _ in range(round(at_most_s)):
            if not what():
                return
            self.nvml.rounds()
        raise AssertionError("it did not end")

    @property
    def health(self) -> SourceHealth:
        return self.nvml.sink.healths[-1]


@pytest.fixture
def source(nvml: HandNvml) -> Source:
    return Source(nvml)


def test_with_everything_on_a_gpu_costs_at_most_twelve_calls_a_round(source):
    source.nvml.driver.fail("nvmlDeviceGetPciInfo_v3", 999)
    nvml = source.begin(2)
    # Without addresses the UUIDs tell their XIDs apart.
    nvml.driver.xid(1, 31)
    nvml.rounds(2)
    found = [nvml.values(gpu).get("xid_errors_total{xid=31}") for gpu in (0, 1)]
    assert found == [None, 1] and "xid_errors_total{xid=79}" in nvml.values(0)
    before = nvml.calls(gpu=1)
    nvml.rounds(60)
    assert "device_sm_active_ratio" in {name for name, _ in nvml.newest(1).values}
    assert (nvml.calls(gpu=1) - before) / 60 <= 12
    # Once at the start, then every ten seconds.
    assert nvml.calls(COUNT) == 1 + 6
    nvml.driver.fail("nvmlEventSetWait_v2", 3)
    nvml.rounds(3)
    assert "not watched through NVML any more: Not Supported" in source.health.reason
    assert source.health.up and nvml.up() == {0, 1}
    readers = {key[1] for key in nvml.sink.counts if key[0] == "nvml_calls_total"}
    assert readers >= {"fields", "memory", "processes", "gpm", "events", "event_wait", "scan"}
    assert nvml.sink.counts["nvml_call_seconds_total", "scan"] > 0
    nvml.driver.fail("nvmlShutdown", 999)
    source.source.close()
    assert nvml.loops.names == ["nvml", "nvml-watchdog"]
    assert nvml.calls(INIT) == nvml.calls("nvmlShutdown") == 1


def test_three_gpus_fail_in_three_ways_and_the_others_keep_their_rate(source, caplog):
    caplog.set_level(logging.INFO)
    nvml = source.begin()
    nvml.driver.set(3, lost=1)
    nvml.driver.set(6, no_permission=1)
    nvml.hang("nvml-5", UTILIZATION, 5)
    counts = [len(nvml.samples(uuid(gpu))) for gpu in range(8)]
    source.wait(STUCK_AFTER_S)
    assert nvml.reasons(3, 6) == ["lost", "no_permission"]
    assert nvml.newest(5).up
    assert caplog.messages == [
        "NVML has 8 devices",
        f"device 3 ({uuid(3)}): lost",
        f"device 6 ({uuid(6)}): no_permission",
        f"device {uuid(3)} (0000:1b:00): XID 79, GPU has fallen off the bus",
    ]
    source.wait(2)
    assert nvml.reasons(3, 5, 6) == ["lost", "stuck", "no_permission"]
    assert nvml.up() == {0, 1, 2, 4, 7}
    for gpu in nvml.up():
        assert len(nvml.samples(uuid(gpu))) == counts[gpu] + 7
        assert nvml.newest(gpu).time == nvml.clock.wall()
    left = {name for gpu in (3, 5, 6) for name, _ in nvml.newest(gpu).values}
    assert left == {
        "device_xid_errors_total",
        "device_xid_last_timestamp_seconds",
        "device_health_events_total",
    }
    # The lost one still tells its XID.
    assert nvml.values(3)["xid_errors_total{xid=79}"] == 1
    assert nvml.ledger.values(uuid(3))["device_xid_errors_total", ("79",)] == 1
    assert source.health.up
    nvml.driver.clear()
    nvml.loops.join()
    # The values of the call that returned late are from before it.
    assert nvml.reasons(5) == ["stuck"]
    nvml.advance(0.0)
    source.wait_while(lambda: nvml.up() != ALL, 11)
    assert source.failures == []
    # One that is gone is looked for now and then.
    nvml.driver.set(1, unknown=1)
    nvml.rounds()
    assert nvml.reasons(0, 1) == ["", "driver"]
    nvml.driver.set(1, unknown=0)
    source.wait(9)
    assert nvml.reasons(1) == ["driver"]
    source.wait(1)
    assert nvml.up() == ALL


def test_a_gpu_that_hangs_from_the_start_is_known_by_its_index(source):
    nvml = source.nvml
    nvml.loops.run("nvml")
    source.stick("nvml-5", gpu=5)
    assert [(s.up, s.reason, s.device.index) for s in nvml.samples("unknown-5")] == [
        (False, "stuck", 5)
    ]
    assert nvml.up() == ALL - {5}
    nvml.release(gpu=5)
    nvml.rounds()
    assert nvml.up() == ALL
    assert "unknown-5" in nvml.sink.forgotten


def test_a_gpu_that_vanishes_is_lost_and_is_found_again_at_another_index(source, caplog):
    caplog.set_level(logging.INFO)
    nvml = source.begin(7)
    # One is plugged in.
    nvml.driver.set(gpus=8)
    source.wait(7)
    nvml.hang("nvml", INIT)
    # It is shut down before: only then does it look for devices again.
    assert (nvml.calls(INIT), nvml.calls("nvmlShutdown")) == (2, 1)
    nvml.release(INIT)
    source.wait_while(lambda: nvml.up() != ALL, 2)
    nvml.driver.set(2, absent=1)
    source.wait_while(lambda: nvml.newest(7).device.index == 7, 13)
    nvml.rounds()
    assert nvml.reasons(2) == ["lost"] and nvml.values(2)["xid_errors_total{xid=79}"] == 0
    assert nvml.up() == ALL - {2}
    busy_s = nvml.values(7)["busy_seconds_total"]
    nvml.driver.set(order="7 0 1 2 3 4 5 6")
    nvml.driver.set(2, absent=0)
    source.wait_while(lambda: nvml.up() != ALL, 13)
    assert [nvml.newest(gpu).device.index for gpu in (7, 0, 2)] == [0, 1, 3]
    again = "devices have come, gone or changed places"
    texts = ["NVML has 7 devices", again, "NVML has 8 devices", f"device 2 ({uuid(2)}): lost"]
    assert caplog.messages == [*texts, again, "NVML has 7 devices", again, "NVML has 8 devices"]
    # It moved, and counts on, but not what was before its first reading there.
    assert busy_s < nvml.values(7)["busy_seconds_total"] < busy_s + 13
    # Another one takes the place of one: their number is the same.
    nvml.driver.set(gpus=9, order="7 0 1 2 3 4 5 6 8")
    nvml.driver.set(3, absent=1)
    source.wait_while(lambda: nvml.up() != {*ALL, 8} - {3})
    assert nvml.reasons(3) == ["lost"]
    # Beside one that has fallen off the bus, too.
    nvml.driver.set(4, lost=1)
    nvml.driver.set(5, absent=1)
    source.wait_while(lambda: nvml.reasons(4, 5) != ["lost", "lost"])
    # None of the others was ever down.
    assert all(sample.up for gpu in (0, 1, 7) for sample in nvml.samples(uuid(gpu)))
    assert nvml.calls("nvmlShutdown") == nvml.calls(INIT) - 1


def test_without_a_driver_the_source_waits(source, tmp_path, monkeypatch):
    nvml, library = source.nvml, tmp_path / "driver.so"
    # An empty name does not count.
    monkeypatch.setattr("warpwatch_devices.nvml.library.LIBRARY", "libnone.so")
    monkeypatch.setenv("WARPWATCH_NVML_LIBRARY", "")
    nvml.rounds()
    assert source.health.reason.startswith("libnone.so not found: ")
    monkeypatch.setenv("WARPWATCH_NVML_LIBRARY", str(library))
    source.wait(5)
    assert not source.health.up
    remedy = "install the NVIDIA driver, or name the file in WARPWATCH_NVML_LIBRARY ("
    assert source.health.reason.startswith(f"{library} not found: {remedy}")
    library.symlink_to(nvml.driver.library / LIBRARY)
    source.wait(4)
    assert not source.health.up
    # Its initialisation does not come back at first.
    source.stick("nvml", INIT)
    assert (source.health.up, source.health.reason) == (False, "NVML does not answer")
    nvml.release(INIT)
    source.wait(2)
    assert nvml.up() == ALL
    assert (source.health.up, source.health.reason) == (True, "")


def test_a_driver_that_goes_away_takes_the_devices_down_until_it_is_back(source, caplog):
    nvml = source.nvml
    # The watchdog has not seen them yet.
    nvml.loops.run("nvml", *(f"nvml-{gpu}" for gpu in range(8)))
    assert nvml.up() == ALL
    nvml.driver.set(driver_gone=1)
    nvml.loops.run("nvml-0")
    assert nvml.reasons(0, 1) == ["driver", ""]
    before = nvml.calls(gpu=0)
    nvml.advance(9)
    # It is not asked before NVML is initialised again.
    nvml.loops.run("nvml-0", "nvml", "nvml-watchdog")
    assert nvml.calls(gpu=0) == before
    assert set(nvml.reasons(*ALL)) == {"driver"}
    assert source.health.reason.endswith("Driver Not Loaded")
    assert (errors := source.health.errors) == 2
    assert nvml.sink.counts["nvml_errors_total", "fields", "uninitialized"] == 1
    nvml.driver.set(driver_gone=None, driver_version="615.71.05")
    source.wait_while(lambda: nvml.up() != ALL, 7)
    assert nvml.newest(0).device.info["driver_version"] == "615.71.05"
    texts = ["no NVML: the driver went away", "no NVML: NVML does not start: Driver Not Loaded"]
    assert caplog.messages == texts
    assert source.failures == []
    nvml.driver.fail("nvmlDeviceGetMemoryInfo_v2", 999)
    nvml.rounds(2)
    assert source.health.errors == errors + 8


def test_a_driver_of_another_version_ends_the_daemon_once_if_it_lasts(source, caplog):
    nvml = source.begin()
    for _ in range(3):
        nvml.driver.set(version_mismatch=1)
        source.wait(GRACE_S / 2)
        assert "different driver versions" in source.health.reason
        nvml.driver.set(version_mismatch=0)
        source.wait_while(lambda: nvml.up() != ALL)
    # It has a stuck call beside it, too.
    source.stick("nvml-1", UTILIZATION, 1)
    nvml.driver.set(version_mismatch=1)
    source.wait(GRACE_S)
    assert "different driver versions; the daemon ends after 60 s of it" in source.health.reason
    assert source.failures == []
    source.wait(3 * GRACE_S)
    assert source.failures == [UPGRADED]
    # Each time is logged once, however often it is tried.
    lasting = [text for text in caplog.messages if "different driver versions" in text]
    assert len(lasting) == 4


def test_a_call_that_hangs_across_a_reload_keeps_nvml_down(source):
    nvml = source.begin()
    for for_long in (False, True):
        source.stick("nvml-1", UTILIZATION, 1)
        nvml.driver.set(driver_gone=1)
        nvml.rounds(2)
        nvml.driver.set(driver_gone=0)
        source.wait(GRACE_S / 2)
        assert not source.health.up
        assert source.health.reason.endswith(BLOCKED)
        assert (nvml.up(), source.failures) == (set(), [])
        source.wait(2 * GRACE_S if for_long else 0)
        # A shutdown under a call is dangerous: the last one frees everything.
        assert nvml.calls("nvmlShutdown") < nvml.calls(INIT)
        nvml.release(UTILIZATION, 1)
        source.wait_while(lambda: nvml.up() != ALL)
        # All initialisations but one are taken back.
        assert nvml.calls("nvmlShutdown") == nvml.calls(INIT) - 1
    assert source.failures == [BLOCKED]


def test_nvml_is_not_shut_down_under_a_call(source):
    nvml = source.begin()
    # Inside, and not yet taken to be stuck.
    nvml.hang("nvml-1", UTILIZATION, 1)
    nvml.driver.set(driver_gone=1)
    nvml.rounds(3)
    assert nvml.reasons(0) == ["driver"]
    source.source.close()
    # Nor is anything freed that the call may use.
    assert (nvml.calls("nvmlShutdown"), nvml.calls("nvmlGpmSampleFree")) == (0, 14)
    published = len(nvml.samples(uuid(1)))
    nvml.release(UTILIZATION, 1)
    assert len(nvml.samples(uuid(1))) == published
    nvml.rounds()
    assert nvml.calls("nvmlShutdown") == 1


def test_devices_that_answer_nothing_any_more_end_the_daemon_once(source):
    nvml = source.begin()
    nvml.driver.set(unknown=1)
    source.wait(GRACE_S)
    assert not source.health.up
    assert "no GPU can be read any more" in source.health.reason
    assert source.failures == []
    source.wait(3 * GRACE_S)
    (failure,) = source.failures
    assert "the container lost its devices" in failure
    nvml.driver.set(unknown=0)
    source.wait_while(lambda: nvml.up() != ALL)
    nvml.rounds()
    assert source.health.up


def test_devices_that_may_not_be_read_or_never_could_end_nothing(source):
    nvml = source.nvml
    nvml.driver.set(gpus=2)
    for gpu in (0, 1):
        nvml.driver.set(gpu, unknown=1)
    source.wait(2 * GRACE_S)
    assert nvml.samples("unknown-1")[-1].reason == "driver"
    assert source.health.up
    for gpu in (0, 1):
        nvml.driver.set(gpu, unknown=0)
    source.wait_while(lambda: nvml.up() != {0, 1})
    nvml.driver.set(no_permission=1)
    source.wait(2 * GRACE_S)
    assert nvml.reasons(0, 1) == ["no_permission"] * 2
    assert source.failures == []
    # One that is tried again may hang in that.
    nvml.advance(10.0)
    source.stick("nvml-1", gpu=1)
    assert nvml.reasons(0, 1) == ["no_permission", "stuck"]


def test_a_device_that_comes_beside_a_stuck_one_is_read_once_its_call_returns(source):
    nvml = source.begin(4)
    source.stick("nvml-1", UTILIZATION, 1)
    assert nvml.reasons(1) == ["stuck"]
    nvml.driver.set(3, absent=1)
    source.wait_while(lambda: nvml.up() != {0, 2})
    assert nvml.reasons(3) == ["lost"]
    nvml.driver.set(3, absent=0)
    source.wait_while(lambda: nvml.up() != {0, 2, 3})
    nvml.driver.set(gpus=5)
    source.wait(11)
    assert (nvml.up(), nvml.reasons(1)) == ({0, 2, 3}, ["stuck"])
    assert source.health.reason == (
        "devices have come or gone; they are searched once no call is stuck any more"
    )
    nvml.release(UTILIZATION, 1)
    nvml.rounds(2)
    assert (nvml.up(), source.health.reason) == ({0, 1, 2, 3, 4}, "")


def test_a_count_of_the_devices_that_hangs_delays_no_sample(source):
    nvml = source.begin(2)
    nvml.advance(8)
    nvml.hang("nvml", COUNT)
    nvml.advance(STUCK_AFTER_S + 1)
    nvml.loops.run("nvml-watchdog")
    assert (source.health.up, source.health.reason) == (False, "NVML does not answer")
    before = len(nvml.samples(uuid(1)))
    nvml.rounds(3)
    assert (nvml.up(), len(nvml.samples(uuid(1)))) == ({0, 1}, before + 3)
    nvml.release(COUNT)
    nvml.rounds()
    assert source.health.up


def test_a_hanging_read_of_the_counters_costs_that_gpu_alone(source, monkeypatch):
    monkeypatch.setattr(gpm, "MAX_WAIT_S", 0.0)
    nvml = source.begin(3)
    nvml.rounds()
    nvml.hang("nvml-1", SAMPLE, 1)
    with_counters = []
    for _ in range(8):
        nvml.rounds()
        with_counters.append([COUNTER in nvml.newest(gpu).values for gpu in (0, 2)])
    # The others stop to wait for it when it is known to be stuck, and have values two rounds later.
    assert (nvml.up(), nvml.reasons(1)) == ({0, 2}, ["stuck"])
    assert with_counters[-1] == [True, True] and [False, False] in with_counters
    evaluations = nvml.calls("nvmlGpmMetricsGet", 1)
    nvml.release(SAMPLE, 1)
    # Others read in parallel by now.
    assert nvml.calls("nvmlGpmMetricsGet", 1) == evaluations
    nvml.rounds(3)
    assert nvml.up() == {0, 1, 2}
    assert COUNTER in nvml.newest(1).values
    source.source.close()
    assert nvml.calls("nvmlGpmSampleAlloc") == nvml.calls("nvmlGpmSampleFree") == 6


def test_a_device_that_never_reported_its_name_is_forgotten_when_it_goes(source):
    nvml = source.nvml
    nvml.driver.set(gpus=3)
    nvml.driver.set(2, lost=1)
    nvml.rounds(2)
    assert nvml.samples("unknown-2") and nvml.up() == {0, 1}
    nvml.driver.set(2, absent=1)
    source.wait_while(lambda: nvml.samples("unknown-2"))
    nvml.driver.set(2, absent=0)
    source.wait_while(lambda: not nvml.samples("unknown-2"))
    nvml.driver.set(driver_gone=1)
    source.wait(20)
    assert nvml.samples("unknown-2") == []


def test_an_instance_that_is_removed_is_forgotten_not_lost(source):
    nvml = source.begin(1)
    assert "nvml-events" in nvml.loops.names
    for instances in (("0=1g.10gb/7/0", "1=1g.10gb/8/0"), ("0=1g.10gb/7/0",), ()):
        nvml.driver.mig(0, *instances)
        source.wait(21)
        found = [samples[-1].up for name, samples in nvml.sink.devices.items() if "MIG-" in name]
        assert found == [True] * len(instances)
    nvml.driver.set(0, lost=1)
    nvml.rounds(2)
    assert nvml.reasons(0) == ["lost"]
    assert not [name for name in nvml.sink.devices if "MIG-" in name]


def test_return_codes_mean_what_the_policy_says(cases):
    cases("nvml_codes.txt", lambda code: f"{meaning_of(int(code)).name} {name_of(int(code))}")
