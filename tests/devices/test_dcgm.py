"""The dcgm source on the stand-in of DCGM's bindings: the real ones cannot be had here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.devices.recording import RecordingSink, wait_until
from warpwatch_daemon.agent.supervisor import Supervisor
from warpwatch_devices.config import DcgmConfig
from warpwatch_devices.dcgm.bindings import FOLDERS
from warpwatch_devices.dcgm.source import DcgmSource
from warpwatch_devices.dcgm.values import PROFILING_ROWS
from warpwatch_devices.source import Surroundings
from warpwatch_telemetry.samples import Device, DeviceSample

STAND_IN = Path(__file__).with_name("dcgm_stand_in")
A, B = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"
# As an A100 has them; 1016 is unknown to the bindings, 1017 to us.
FIELDS = [*range(1001, 1016), 1016, 1017]


class Engine:
    """The host engine that the stand-in pretends: change its state at any time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state: dict[str, Any] = {
            "gpus": [
                {"id": 0, "uuid": A, "profiling": FIELDS},
                {"id": 1, "uuid": B, "profiling": FIELDS},
            ],
            "values": {
                "1/0": {"1001": 0.91, "1002": 0.8, "1004": 0.5, "1009": 1500000000},
                "1/1": {"1001": 0.25},
            },
        }
        self.change()

    def change(self, **changes: Any) -> None:
        self.state |= changes
        new = self.folder / "state.new"
        new.write_text(json.dumps(self.state))
        new.replace(self.folder / "state.json")

    @property
    def paused(self) -> bool:
        return (self.folder / "paused").exists()

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("DCGM_STAND_IN", str(tmp_path))
    return Engine(tmp_path)


class Around:
    """What the source may know of the daemon."""

    def __init__(self) -> None:
        self.known: tuple[DeviceSample, ...] = ()
        self.wanted = False


@contextmanager
def running(
    around: Around | None = None,
    address: str = "localhost:5555",
    bindings: Path = STAND_IN,
    **times: float,
) -> Iterator[RecordingSink]:
    it = around or Around()
    surroundings = Surroundings(lambda _: None, lambda: it.known, lambda: it.wanted, lambda _: None)
    config = DcgmConfig(enabled=True, address=address, bindings=bindings)
    seconds = {"RETRY_FIRST_S": 0.05, "DISCOVERY_INTERVAL_S": 0.1, "INTERVAL_S": 0.1} | times
    sink, supervisor = RecordingSink(), Supervisor()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in seconds.items():
            module = "pause" if name == "MAX_PAUSE_S" else "source"
            patch.setattr(f"warpwatch_devices.dcgm.{module}.{name}", value)
        source = DcgmSource(config, surroundings)
        try:
            source.start(supervisor, sink)
            yield sink
        finally:
            supervisor.stop(0.5)
            source.close()


def newest(sink: RecordingSink, uuid: str) -> DeviceSample | None:
    with sink.lock:
        return sink.devices[uuid][-1] if uuid in sink.devices else None


def values(sink: RecordingSink, uuid: str) -> dict[str, float]:
    """The newest by metric name."""
    sample = newest(sink, uuid)
    return {name: value for (name, _), value in sample.values.items()} if sample else {}


def down(sink: RecordingSink) -> str:
    return sink.healths[-1].reason if sink.healths and not sink.healths[-1].up else ""


def test_profiling_fields_become_our_series(engine: Engine) -> None:
    begun = time.time()
    with running() as sink:
        wait_until(lambda: newest(sink, A) and newest(sink, B))
    sample = newest(sink, A)
    assert sample is not None and sample.source == "dcgm" and sample.up
    assert begun <= sample.time <= time.time()
    assert sample.values == {
        ("device_graphics_active_ratio", ()): 0.91,
        ("device_sm_active_ratio", ()): 0.8,
        ("device_tensor_active_ratio", ()): 0.5,
        ("device_pcie_transmit_bytes_per_second", ()): 1.5e9,
    }
    assert sample.device == Device(
        A,
        0,
        "NVIDIA A100-SXM4-80GB",
        info={
            "driver_version": "550.54.15",
            "pci_bus_id": "00000000:00:00.0",
            "vbios_version": "92.00.36.00.01",
        },
    )
    assert values(sink, B) == {"device_graphics_active_ratio": 0.25}
    assert (sink.healths[-1].up, sink.healths[-1].reason) == (True, "")


def test_each_gpu_is_watched_by_itself_for_what_it_supports(engine: Engine) -> None:
    engine.state["gpus"][1]["profiling"] = [1001, 1005]
    engine.change()
    with running() as sink:
        wait_until(lambda: newest(sink, B))
    everything = ",".join(map(str, range(1001, 1016)))
    assert engine.calls[:3] == [
        "connect localhost:5555 None",
        f"watch [(1, 0)] {everything} 100000 2.0 0",
        "watch [(1, 1)] 1001,1005 100000 2.0 0",
    ]
    # Nothing is left behind.
    assert engine.calls[-3:] == ["unwatch [(1, 0)]", "unwatch [(1, 1)]", "disconnect"]


def test_every_profiling_field_of_the_name_table_is_dcgms_1001_to_1016() -> None:
    assert len(PROFILING_ROWS) == 16


@pytest.mark.parametrize(
    ("address", "call"),
    [
        ("embedded", "connect None None"),
        ("/run/nvidia/hostengine.sock", "connect None /run/nvidia/hostengine.sock"),
        ("10.0.0.7", "connect 10.0.0.7 None"),
    ],
)
def test_addresses(engine: Engine, address: str, call: str) -> None:
    with running(address=address) as sink:
        wait_until(lambda: newest(sink, A))
    assert engine.calls[0] == call


def test_blank_impossible_and_old_values_are_absent(engine: Engine) -> None:
    blanks = {"1001": 140737488355328.0, "1002": 1.2, "1009": 9223372036854775794, "1003": 0.4}
    engine.change(values={"1/0": blanks, "1/1": {"1001": 0.5}})
    with running() as sink:
        wait_until(lambda: newest(sink, A))
        assert values(sink, A) == {"device_sm_occupancy_ratio": 0.4}
        assert sink.healths[-1].errors >= 3
        # The host engine answers, but with what it read long ago.
        engine.change(age_s=60)
        wait_until(lambda: not sink.devices)


def test_a_gpu_that_cannot_be_profiled_costs_itself_alone(engine: Engine) -> None:
    engine.state["gpus"][0]["profiling"] = []
    engine.change()
    with running() as sink:
        wait_until(lambda: newest(sink, B))
        wait_until(lambda: sink.healths and sink.healths[-1].up)
    assert list(sink.devices) == [B]
    assert sink.healths[-1].reason == (
        "GPU 0: Profiling is not supported for this group of GPUs or GPU"
    )


def test_a_lost_gpu_is_down(engine: Engine) -> None:
    with running(DISCOVERY_INTERVAL_S=60) as sink:
        wait_until(lambda: newest(sink, A))
        engine.state["gpus"][0]["status"] = 4
        engine.change(values={"1/1": {"1001": 0.5}})
        wait_until(lambda: not sink.devices[A][-1].up)
        assert (sink.devices[A][-1].reason, sink.devices[A][-1].values) == ("lost", {})
        assert sink.devices[B][-1].up


MIG = {
    "instances": [{"id": 4, "gpu": 0, "gi": 7}, {"id": 5, "gpu": 0, "gi": 9}],
    "values": {"1/0": {"1001": 0.9}, "4/4": {"1001": 0.5, "1009": 7}, "4/5": {"1001": 0.25}},
}


def test_gpu_instances_are_the_mig_devices_of_nvml(engine: Engine) -> None:
    engine.change(**MIG)
    around = Around()
    around.known = (
        DeviceSample(Device(A, 5, "A100"), 1.0),
        DeviceSample(Device("MIG-seven", 5, "A100", "7", "1g.10gb", {"parent_uuid": A}), 1.0),
        DeviceSample(Device("MIG-other", 0, "A100", "9", info={"parent_uuid": "GPU-x"}), 1.0),
    )
    with running(around) as sink:
        wait_until(lambda: newest(sink, "MIG-seven"))
    assert sorted(sink.devices) == [A, "MIG-seven"]
    sample = newest(sink, "MIG-seven")
    assert sample is not None and sample.device == around.known[1].device
    assert values(sink, "MIG-seven") == {"device_graphics_active_ratio": 0.5}
    assert any(call.startswith("watch [(1, 0), (4, 4), (4, 5)] ") for call in engine.calls)


def test_instances_of_a_gpu_without_nvml_have_a_key_of_their_own(engine: Engine) -> None:
    engine.change(**MIG)
    around = Around()
    # The hub gives back what this source itself published: that is not NVML's word.
    around.known = (DeviceSample(Device(A, 0, "A100"), 1.0, source="dcgm"),)
    with running(around) as sink:
        wait_until(lambda: newest(sink, f"{A}/gi9"))
        assert values(sink, f"{A}/gi7") == {"device_graphics_active_ratio": 0.5}
        # NVML came: the instance has its right name now.
        around.known = (
            DeviceSample(Device(A, 0, "A100"), 1.0),
            DeviceSample(Device("MIG-seven", 0, "A100", "7", info={"parent_uuid": A}), 1.0),
        )
        wait_until(lambda: sorted(sink.devices) == [A, "MIG-seven"])


def test_instances_come_and_go_while_it_runs(engine: Engine) -> None:
    with running() as sink:
        wait_until(lambda: newest(sink, A))
        engine.change(**MIG)
        wait_until(lambda: newest(sink, f"{A}/gi7"))
        engine.change(instances=[{"id": 6, "gpu": 0, "gi": 1}], values={"4/6": {"1001": 0.125}})
        wait_until(lambda: list(sink.devices) == [f"{A}/gi1"])
        assert down(sink) == ""


def test_profiling_is_paused_while_a_capture_wants_the_counters(engine: Engine) -> None:
    around = Around()
    # What was read before the pause is absent as well.
    engine.change(not_updated=True)
    with running(around) as sink:
        wait_until(lambda: values(sink, A))
        around.wanted = True
        wait_until(lambda: newest(sink, A) and not values(sink, A))
        assert engine.paused and sink.devices[A][-1].up
        wait_until(lambda: sink.healths[-1].reason == "profiling is paused for a capture")
        assert sink.healths[-1].up
        around.wanted = False
        wait_until(lambda: values(sink, A))
        assert not engine.paused
    assert (engine.calls.count("pause"), engine.calls.count("resume")) == (1, 1)


def test_profiling_is_resumed_at_the_end(engine: Engine) -> None:
    around = Around()
    with running(around) as sink:
        wait_until(lambda: values(sink, A))
        around.wanted = True
        wait_until(lambda: engine.paused)
    assert not engine.paused and engine.calls[-1] == "disconnect"


def test_a_pause_that_lasts_too_long_is_ended_and_not_begun_again(engine: Engine) -> None:
    around = Around()
    around.wanted = True
    with running(around, MAX_PAUSE_S=0.3) as sink:
        wait_until(lambda: "pause" in engine.calls)
        wait_until(lambda: values(sink, A))
        rounds = len(sink.devices[A])
        wait_until(lambda: len(sink.devices[A]) > rounds + 3)
        assert engine.calls.count("pause") == 1 and not engine.paused
        around.wanted = False
        rounds = len(sink.devices[A])
        wait_until(lambda: len(sink.devices[A]) > rounds + 3)
        around.wanted = True
        wait_until(lambda: engine.calls.count("pause") == 2)


def test_a_pause_that_outlived_the_connection_is_ended(engine: Engine) -> None:
    around = Around()
    with running(around) as sink:
        wait_until(lambda: values(sink, A))
        around.wanted = True
        wait_until(lambda: engine.paused and not values(sink, A))
        engine.change(up=False)
        wait_until(lambda: down(sink))
        around.wanted = False
        engine.change(up=True)
        wait_until(lambda: values(sink, A))
        assert not engine.paused


def test_a_host_engine_that_starts_again_during_a_pause_is_paused_again(engine: Engine) -> None:
    around = Around()
    with running(around) as sink:
        wait_until(lambda: values(sink, A))
        around.wanted = True
        wait_until(lambda: engine.paused and not values(sink, A))
        (engine.folder / "paused").unlink()
        engine.change(started=1)
        wait_until(lambda: engine.paused)
        assert values(sink, A) == {}


def test_a_host_engine_that_cannot_pause_goes_on(engine: Engine) -> None:
    engine.change(no_module=True)
    around = Around()
    around.wanted = True
    with running(around) as sink:
        wait_until(lambda: len(sink.devices.get(A, [])) > 2)
        assert values(sink, A) and down(sink) == ""


def test_a_host_engine_that_goes_away_comes_back(engine: Engine) -> None:
    engine.change(up=False)
    with running() as sink:
        wait_until(lambda: down(sink))
        assert down(sink) == (
            "DCGM at localhost:5555: The connection to the host engine is not valid any longer"
        )
        assert sink.devices == {}
        engine.change(up=True)
        wait_until(lambda: values(sink, A) and not down(sink))
        # Restarted between two readings: nothing of before is known to it.
        engine.change(started=1, values={"1/0": {"1001": 0.125}})
        wait_until(lambda: values(sink, A) == {"device_graphics_active_ratio": 0.125})


def test_a_call_that_does_not_return_is_said_by_the_watchdog(engine: Engine) -> None:
    with running(STUCK_AFTER_S=0.3) as sink:
        wait_until(lambda: values(sink, A))
        engine.change(stuck=True)
        wait_until(lambda: down(sink))
        assert down(sink) == "DCGM at localhost:5555 does not answer"
        engine.change(stuck=False)
        wait_until(lambda: sink.healths[-1].up)


def test_the_daemon_ends_while_a_call_does_not_return(engine: Engine) -> None:
    with running(STUCK_AFTER_S=0.3) as sink:
        wait_until(lambda: values(sink, A))
        engine.change(stuck=True)
        wait_until(lambda: down(sink))
    # Reached at all: close did not wait for the call.
    engine.change(stuck=False)


def test_missing_bindings_are_named_with_the_remedy(tmp_path: Path) -> None:
    with running(bindings=tmp_path) as sink:
        wait_until(lambda: down(sink))
    assert down(sink) == (
        f"DCGM at localhost:5555: no pydcgm.py in {tmp_path}: install DCGM's packages, or name"
        " the folder of its Python bindings in sources.dcgm.bindings"
    )
    assert FOLDERS[0] == Path("/usr/share/datacenter-gpu-manager-4/bindings/python3")


def test_without_a_gpu_it_says_so(engine: Engine) -> None:
    engine.change(gpus=[])
    with running() as sink:
        wait_until(lambda: sink.healths and sink.healths[-1].up)
    assert sink.healths[-1].reason == "DCGM supports no GPU here"
