"""XIDs and health events from a fake driver: each once, of every GPU, also after one has failed."""

from itertools import pairwise
from pathlib import Path

import pynvml
import pytest

from tests.devices.nvml_by_hand import HandNvml, texts, uuid
from warpwatch_devices.kernel_log import KernelLogSource
from warpwatch_devices.nvml.events import HEALTH_EVENTS, EventWatcher, Registration, Renewals
from warpwatch_devices.nvml.library import initialise

DOUBLE_BIT_ECC = 0x2
RECOVERY_ACTION = 0x8000
FIRST_BUS = 0x18
STUCK_AFTER_S = 5.0
WAIT, REGISTER = "nvmlEventSetWait_v2", "nvmlDeviceRegisterEvents"


class Events:
    def __init__(self, nvml: HandNvml) -> None:
        self.nvml = nvml
        clock = nvml.clock.monotonic
        self.watcher = EventWatcher(nvml.loops, nvml.sink, nvml.ledger, clock)
        nvml.closing.append(self.watcher.close)

    def begin(self, gpus: int) -> None:
        self.nvml.driver.set(gpus=gpus)
        initialise()
        for gpu in range(gpus):
            self.register(gpu)

    def register(self, gpu: int) -> None:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid(gpu))
        self.watcher.register(uuid(gpu), pynvml.nvmlDeviceGetPciInfo(handle).busId, handle)

    def round(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.nvml.advance(0.5)
            self.watcher.watch(STUCK_AFTER_S)
            self.nvml.loops.run("nvml-events")

    def reported(self, gpu: int) -> dict[str, float]:
        return texts(self.nvml.ledger.values(uuid(gpu)))

    def xid(self, gpu: int, number: int) -> float | None:
        return self.reported(gpu).get(f"xid_errors_total{{xid={number}}}")

    @property
    def sets(self) -> int:
        return self.nvml.calls("nvmlEventSetCreate")

    @property
    def waits(self) -> int:
        return self.nvml.calls(WAIT)

    def stuck(self, function: str, gpu: int | None = None) -> None:
        self.nvml.hang("nvml-events", function, gpu)
        before = len(self.nvml.loops.all)
        self.nvml.advance(STUCK_AFTER_S + 0.49)
        self.watcher.watch(STUCK_AFTER_S)
        assert len(self.nvml.loops.all) == before
        self.nvml.advance(0.02)
        self.watcher.watch(STUCK_AFTER_S)
        assert len(self.nvml.loops.all) == before + 1


@pytest.fixture
def events(nvml: HandNvml) -> Events:
    return Events(nvml)


def test_an_event_and_its_line_in_the_kernel_log_count_once(events: Events, tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.touch()
    events.begin(2)
    nvml = events.nvml
    log = KernelLogSource(nvml.ledger, path, nvml.clock.monotonic)
    log.start(nvml.loops, nvml.sink)
    nvml.rounds()
    events.nvml.driver.xid(1, 31)
    with path.open("a") as file:
        for number in (31, 48):
            address = f"PCI:0000:{FIRST_BUS + 1:02x}:00"
            file.write(f"4,7,8,-;NVRM: Xid ({address}): {number}, pid=1\n")
    nvml.rounds()
    log.close()
    assert (events.xid(1, 31), events.xid(1, 48)) == (1, 1)
    assert (events.xid(0, 31), events.xid(0, 48)) == (None, 0)
    assert events.reported(1)["xid_last_timestamp_seconds{xid=31}"] == nvml.clock.wall()


def test_every_event_counts_for_its_gpu_and_kind(events: Events) -> None:
    events.begin(2)
    events.round()
    fake = events.nvml.driver
    assert events.reported(0)["health_events_total{event=double_bit_ecc}"] == 0
    for _ in range(3):
        fake.xid(0, 13)
    fake.xid(1, 13, instances=(1, 0))
    fake.event(0, DOUBLE_BIT_ECC, 0)
    fake.event(1, RECOVERY_ACTION, 1)
    events.round()
    assert (events.xid(0, 13), events.xid(1, 13)) == (3, 1)
    health = [
        {name for name, total in events.reported(gpu).items() if "health" in name and total}
        for gpu in (0, 1)
    ]
    assert health == [
        {"health_events_total{event=double_bit_ecc}"},
        {"health_events_total{event=recovery_action}"},
    ]
    # A flood is taken in bounded rounds, without waiting, and in full.
    for _ in range(220):
        fake.xid(1, 31)
    before = events.waits
    events.round()
    assert (events.xid(1, 31), events.waits - before) == (200, 200)
    events.round()
    assert events.xid(1, 31) == 220


def test_a_new_device_shortens_the_waits_for_a_while(events: Events) -> None:
    events.begin(1)
    loop = events.nvml.loops["nvml-events"]
    events.round(3)
    woken = loop.woken
    assert woken == 1 + 3
    events.round(5)
    assert loop.woken == woken


def test_a_gpu_that_comes_back_often_costs_the_others_one_new_set(events: Events) -> None:
    events.begin(2)
    events.round()
    sets = events.sets
    for _ in range(6):
        events.register(1)
        events.round()
        assert events.sets == sets + 1
    events.nvml.driver.xid(0, 13)
    events.nvml.driver.xid(1, 31)
    events.round()
    assert (events.xid(0, 13), events.xid(1, 31)) == (1, 1)
    # The last time it came back there was no new set yet.
    events.round(20)
    assert events.sets == sets + 2


def test_the_pauses_of_what_is_tried_again_double_up_to_a_limit() -> None:
    renewals = Renewals()
    assert [renewals.schedule(now) for now in (100.0, 105.0, 109.9)] == [0.0, 110.0, 110.0]
    assert [renewals.schedule(now) for now in (110.0, 129.9, 130.0)] == [0.0, 130.0, 0.0]
    # After a quiet time it is as new.
    assert [renewals.schedule(now) for now in (170.0 + 40.1, 220.0)] == [0.0, 220.1]
    device, pauses = Registration("GPU", "1", None, 1), []
    for _ in range(7):
        device.back_off(50.0)
        pauses.append(device.retry_at - 50.0)
    assert pauses == [10, 20, 40, 80, 160, 300, 300]


def test_the_end_of_watching_is_said_once(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    events.begin(1)
    events.round()
    assert events.watcher.trouble == ""
    events.nvml.driver.fail(WAIT, 4)
    events.round(3)
    trouble = "XIDs and events are not watched through NVML any more: Insufficient Permissions"
    assert events.watcher.trouble == trouble
    assert [record.message for record in caplog.records] == [trouble]


def test_gpus_are_registered_for_what_they_support(events: Events) -> None:
    events.nvml.driver.set(1, profile="v100")
    events.nvml.driver.fail("nvmlDeviceGetSupportedEventTypes", 3, gpu=2)
    events.nvml.driver.fail(REGISTER, 999, gpu=3)
    events.begin(4)
    events.round(2)
    of_v100 = [name for name in events.reported(1) if name.startswith("health")]
    assert of_v100 == [f"health_events_total{{event={of}_bit_ecc}}" for of in ("single", "double")]
    health = [name for name in events.reported(0) if name.startswith("health")]
    assert health == [f"health_events_total{{event={name}}}" for name in HEALTH_EVENTS.values()]
    assert events.reported(2) == {} and events.reported(3) == {}
    events.nvml.driver.xid(1, 13)
    events.round()
    assert events.xid(1, 13) == 1
    assert [events.nvml.calls(REGISTER, gpu) for gpu in range(4)] == [2, 2, 0, 1]
    # An unknown error leaves the set in an undefined state: there was another one after it.
    assert events.sets == 2
    events.nvml.driver.fail(REGISTER, 0, gpu=3)
    events.round(20)
    assert events.xid(3, 79) == 0


def test_a_lost_gpu_neither_spins_nor_hides_the_others(events: Events) -> None:
    events.begin(3)
    events.round()
    events.nvml.driver.set(1, lost=1)
    before = events.waits
    events.round(2)
    assert events.xid(1, 79) == 1
    events.watcher.forget(uuid(1))
    for _ in range(3):
        events.nvml.driver.xid(0, 13)
        events.nvml.driver.xid(2, 31)
        events.round()
    assert events.xid(0, 13) == events.xid(2, 31) == 3
    # One for a wait, one for the registration in the new set.
    assert events.nvml.sink.counts["nvml_errors_total", "events", "gpu_is_lost"] == 2
    # The XID and the error, then a wait a round and one more for each event.
    assert events.waits - before == 2 + 1 + 3 * 3
    assert events.nvml.sink.counts["nvml_calls_total", "event_wait"] == events.waits
    events.nvml.driver.set(1, lost=None)
    events.register(1)
    events.round()
    events.nvml.driver.xid(1, 94)
    events.round()
    assert (events.xid(1, 94), events.xid(1, 79)) == (1, 1)


def test_a_set_in_an_unknown_state_is_built_again_with_back_off(events: Events) -> None:
    events.begin(1)
    events.round()
    events.nvml.driver.fail(WAIT, 999)
    built_at = []
    for number in range(200):
        sets = events.sets
        events.round()
        if events.sets > sets:
            built_at.append(number / 2)
    # At once the first time.
    pauses = [later - earlier for earlier, later in pairwise(built_at)]
    assert built_at[0] == 0.5
    assert pauses[:6] == [1, 2, 4, 8, 16, 30]
    events.nvml.driver.fail(WAIT, 0)
    events.round(182)
    events.nvml.driver.xid(0, 43)
    events.round()
    assert events.xid(0, 43) == 1
    # It has worked for so long that the next failure is the first again.
    events.nvml.driver.fail(WAIT, 999)
    sets = events.sets
    events.round(2)
    assert events.sets == sets + 1
    events.watcher.close()
    assert events.sets == events.nvml.calls("nvmlEventSetFree")


def test_a_call_that_hangs_is_replaced(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    events.begin(2)
    events.stuck(REGISTER, 0)
    events.round(2)
    events.nvml.driver.xid(1, 74)
    events.round()
    assert (events.xid(1, 74), events.reported(0)) == (1, {})
    events.nvml.release(REGISTER, 0)
    events.round()
    events.stuck(WAIT)
    assert events.watcher.in_flight
    events.nvml.release(WAIT)
    events.round()
    events.nvml.driver.xid(1, 63)
    events.round()
    assert (events.xid(1, 63), events.watcher.in_flight) == (1, False)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        f"NVML events: the registration of device {uuid(0)} does not return",
        "NVML events: the wait of the event set does not return",
    ]


def test_closing_frees_the_set_but_not_under_a_call(events: Events) -> None:
    events.begin(1)
    events.round()
    events.nvml.hang("nvml-events", WAIT)
    events.watcher.close()
    assert events.nvml.calls("nvmlEventSetFree") == 0
    events.register(0)
    assert events.nvml.loops.names == []
