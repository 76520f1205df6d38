"""XIDs and health events from a fake driver: each once, of every GPU, also after one has failed."""

from pathlib import Path

import pynvml
import pytest

from tests.devices.nvml_by_hand import HandNvml, texts, uuid
from warpwatch_devices.nvml.events import HEALTH_EVENTS, EventPoller, GpuEvents
from warpwatch_devices.nvml.library import CallCosts, DeviceGone, initialise
from warpwatch_devices.xids import KernelLogSource

DOUBLE_BIT_ECC = 0x2
RECOVERY_ACTION = 0x8000
FIRST_BUS = 0x18
WAIT, REGISTER, CREATE = "nvmlEventSetWait_v2", "nvmlDeviceRegisterEvents", "nvmlEventSetCreate"
NOT_WATCHED = "XIDs and events are not watched through NVML any more: "


class Events:
    """The events of some GPUs, which their loops register in each round."""

    def __init__(self, nvml: HandNvml) -> None:
        self.nvml = nvml
        self.poller = EventPoller(nvml.loops, 30.0, 5.0, nvml.clock.monotonic)
        self.gpus: list[GpuEvents] = []
        self.costs = CallCosts()
        nvml.closing.append(self.poller.close)

    def begin(self, gpus: int) -> None:
        self.nvml.driver.set(gpus=gpus)
        initialise()
        self.poller.start()
        # However seldom values are read.
        assert self.nvml.loops["nvml-events"].interval_s == 1.0
        for gpu in range(gpus):
            address = pynvml.nvmlDeviceGetPciInfo(self.handle(gpu)).busId
            self.gpus.append(GpuEvents(uuid(gpu), address, self.nvml.ledger, self.costs))
            self.poller.add(self.gpus[-1])

    def handle(self, gpu: int) -> object:
        return pynvml.nvmlDeviceGetHandleByUUID(uuid(gpu))

    def register(self, gpu: int) -> None:
        self.gpus[gpu].register(self.handle(gpu), self.nvml.clock.monotonic())

    def round(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.nvml.advance(1.0)
            for gpu in range(len(self.gpus)):
                self.register(gpu)
            self.nvml.loops.run("nvml-events")

    def reported(self, gpu: int) -> dict[str, float]:
        return texts(self.nvml.ledger.values(uuid(gpu)))

    def xid(self, gpu: int, number: int) -> float | None:
        return self.reported(gpu).get(f"xid_errors_total{{xid={number}}}")

    @property
    def waits(self) -> int:
        return self.nvml.calls(WAIT)


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
    events.round()
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
    # A flood is read in bounded rounds, and in full.
    for _ in range(220):
        fake.xid(1, 31)
    before = events.waits
    events.round()
    assert (events.xid(1, 31), events.waits - before) == (200, 1 + 200)
    events.round()
    assert events.xid(1, 31) == 220


def test_a_driver_that_gives_no_events_is_reported_once(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    events.begin(2)
    events.round()
    assert events.poller.trouble == ""
    events.nvml.driver.fail(WAIT, 4)
    events.round(3)
    trouble = NOT_WATCHED + "Insufficient Permissions"
    assert events.poller.trouble == trouble
    assert [record.message for record in caplog.records] == [trouble]
    # Neither is called again.
    before = events.waits, events.nvml.calls(CREATE)
    events.round(30)
    assert (events.waits, events.nvml.calls(CREATE)) == before == (4, 2)


def test_gpus_are_registered_for_what_they_support(events: Events) -> None:
    events.nvml.driver.set(1, profile="v100")
    events.nvml.driver.fail("nvmlDeviceGetSupportedEventTypes", 3, gpu=2)
    events.nvml.driver.fail(REGISTER, 999, gpu=3)
    events.nvml.driver.fail(REGISTER, 3, gpu=4)
    events.begin(5)
    events.round(2)
    of_v100 = [name for name in events.reported(1) if name.startswith("health")]
    assert of_v100 == [f"health_events_total{{event={of}_bit_ecc}}" for of in ("single", "double")]
    health = [name for name in events.reported(0) if name.startswith("health")]
    assert health == [f"health_events_total{{event={name}}}" for name in HEALTH_EVENTS.values()]
    assert [events.reported(gpu) for gpu in (2, 3, 4)] == [{}] * 3
    assert events.poller.trouble == NOT_WATCHED + "Not Supported"
    # One whose registration failed otherwise is tried again after ten seconds.
    events.round(9)
    assert [events.nvml.calls(REGISTER, gpu) for gpu in range(5)] == [1, 1, 0, 2, 1]
    events.nvml.driver.fail(REGISTER, 0, gpu=3)
    events.round(10)
    assert events.xid(3, 79) == 0
    assert events.nvml.calls(CREATE) - events.nvml.calls("nvmlEventSetFree") == 3


def test_a_lost_gpu_reports_its_xid_and_costs_the_others_nothing(events: Events) -> None:
    events.begin(2)
    events.round()
    handle, lost = events.handle(0), events.handle(1)
    events.nvml.driver.set(1, lost=1)
    for _ in range(12):
        events.nvml.driver.xid(0, 13)
        events.nvml.advance(1.0)
        events.gpus[0].register(handle, events.nvml.clock.monotonic())
        events.nvml.loops.run("nvml-events")
    assert (events.xid(1, 79), events.xid(0, 13)) == (1, 12)
    events.poller.costs.drain(events.nvml.sink.count)
    assert events.nvml.sink.counts["nvml_errors_total", "events", "gpu_is_lost"] == 1
    with pytest.raises(DeviceGone, match="lost"):
        events.gpus[1].register(lost, events.nvml.clock.monotonic())
    # It comes back, at a handle of its own.
    events.nvml.driver.set(1, lost=None)
    events.gpus[1].renew()
    events.round()
    events.nvml.driver.xid(1, 94)
    events.round()
    assert (events.xid(1, 94), events.xid(1, 79)) == (1, 1)


def test_a_set_in_an_unknown_state_is_built_again(events: Events) -> None:
    events.begin(2)
    events.round()
    events.nvml.driver.fail(WAIT, 999)
    events.round()
    events.nvml.driver.fail(WAIT, 0)
    events.round(9)
    assert events.nvml.calls(CREATE) == 2
    events.round(2)
    events.nvml.driver.xid(0, 43)
    events.round()
    assert (events.xid(0, 43), events.nvml.calls(CREATE)) == (1, 4)
    # One that came back has another set, and the old one is freed.
    events.gpus[0].renew()
    events.round()
    assert (events.nvml.calls(CREATE), events.nvml.calls("nvmlEventSetFree")) == (5, 3)
    events.poller.close()
    assert events.nvml.calls(CREATE) == events.nvml.calls("nvmlEventSetFree")


def test_a_wait_that_hangs_is_reported_and_its_set_is_not_freed(events: Events) -> None:
    events.begin(1)
    events.round()
    events.nvml.hang("nvml-events", WAIT)
    events.nvml.advance(5.1)
    assert events.poller.trouble == (
        "XIDs and events are not watched: a wait for them does not return"
    )
    events.poller.close()
    assert events.poller.in_flight
    assert events.nvml.calls("nvmlEventSetFree") == 0
    events.nvml.release(WAIT)
    events.poller.close()
    assert events.nvml.calls("nvmlEventSetFree") == 1
