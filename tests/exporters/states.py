"""States with everything in them, for the exporters' tests."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from warpwatch_devices.simulated import PROFILES, SimulatedDevice
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import (
    Attribution,
    Device,
    DeviceProcess,
    DeviceSample,
    HostSample,
    SourceHealth,
    Workload,
)
from warpwatch_telemetry.state import JobState, RankState, Sensitivity, State

TIME = 1_700_000_000.0
NOW = 1_790_000_000.0
_PARTS = msgspec.json.decode(Path(__file__).with_name("states.json").read_bytes())
SLOW = msgspec.convert(_PARTS["anomaly"], Anomaly)
CAPTURE = msgspec.convert(_PARTS["capture"], Capture)
LONG = replace(CAPTURE, id="c-long", diagnosis={"summary": f"two\nlines {'x' * 999}"})
_RANK = msgspec.convert(_PARTS["rank"], RankState)
_CAPTURES = msgspec.convert(_PARTS["captures"], tuple[Capture, ...])
_SOURCES = msgspec.convert(_PARTS["sources"], tuple[SourceHealth, ...])
_MORE_RANKS = msgspec.convert(_PARTS["more_ranks"], tuple[RankState, ...])
_MORE_JOBS = msgspec.convert(_PARTS["more_jobs"], tuple[JobState, ...])
_MORE_CAPTURES = msgspec.convert(_PARTS["more_captures"], tuple[Capture, ...])
_SENSITIVITIES = msgspec.convert(_PARTS["sensitivities"], tuple[Sensitivity, ...])
_ATTRIBUTIONS, _MORE_ATTRIBUTIONS = (
    msgspec.convert(_PARTS[name], tuple[Attribution, ...], strict=False)
    for name in ("attributions", "more_attributions")
)


def state_of(*found: Anomaly | Capture, time: float = NOW) -> State:
    return State(
        time,
        "0.1.0",
        "gpu-17",
        anomalies=tuple(one for one in found if isinstance(one, Anomaly)),
        captures=tuple(one for one in found if isinstance(one, Capture)),
    )


def simulated(count: int, seconds: int = 60, load: float | None = 0.9) -> tuple[DeviceSample, ...]:
    samples = []
    for index in range(count):
        device = SimulatedDevice(index, PROFILES["h100"])
        for second in range(seconds + 1):
            sample = device.advance(TIME + second, 1.0 if second else 0.0, load)
        samples.append(sample)
    return tuple(samples)


def rank(number: int, **changes: Any) -> RankState:
    about: dict[str, Any] = {"rank": number, "local_rank": number, "name": str(number)}
    about |= {"pid": 4000 + number, "device": f"GPU-{number}"}
    return replace(_RANK, **{**about, **changes})


def full_state() -> State:
    lost = Device("GPU-lost", 2, "NVIDIA H100 80GB HBM3")
    values = simulated(1)[0].values
    instance = Device("MIG-1", 3, "NVIDIA H100 80GB HBM3", gpu_instance="7", profile="1g.10gb")
    power: dict[SeriesKey, float] = {("device_power_watts", ()): values["device_power_watts", ()]}
    xid: dict[SeriesKey, float] = {
        ("device_xid_errors_total", ("79",)): 1,
        ("device_xid_last_timestamp_seconds", ("79",)): TIME - 5,
    }
    gpus = simulated(2)
    active = msgspec.convert(_PARTS["active"], Anomaly)
    return State(
        time=TIME,
        version="0.1.0",
        hostname="node-1",
        devices=(
            *gpus,
            DeviceSample(lost, TIME, xid, up=False, reason="lost"),
            DeviceSample(instance, TIME, power),
            DeviceSample(Device("GPU-4", 4, "NVIDIA L4"), TIME, power),
        ),
        host=HostSample(TIME, {("host_memory_total_bytes", ()): 2**40}),
        sources=_SOURCES,
        ranks=(rank(0, energy_j=617.25), rank(1, status="died", memory_reserved_bytes=None)),
        jobs=(JobState("llama", 2, ("0", "1"), energy_j=1234.5, owner="uid/1000"),),
        anomalies=(active, replace(active, id="a2", summary="rank 0 was", end_time=TIME)),
        captures=_CAPTURES,
        attributions=_ATTRIBUTIONS,
        public_url="https://warpwatch.example",
    )


def odd_state() -> State:
    """Return a state with what must be left out, escaped, told apart or named by its pod."""
    values: dict[SeriesKey, float] = {
        ("device_power_watts", ()): float("nan"),
        ("device_energy_joules_total", ()): float("inf"),
        ("device_made_up", ()): 1.0,
        ("device_clock_hertz", ("sm", "extra")): 1.0,
        ("device_recovery_action", ()): 0,
        ("device_nvlink_link_up", ("0",)): 0,
        ("device_nvlink_link_up", ("1",)): 1,
    }
    full = full_state()
    device = Device("GPU-1", 0, "no UTF-8: \udce9")
    idle = (DeviceProcess(5, "idle", 0, 0.0), DeviceProcess(6, "unknown"))
    ours: dict[str, Any] = {"owner": "ns/team", "pod_uid": "p-1"}
    found = replace(full.anomalies[0], job="llama", owner="ns/team", run="r1", rank=1)
    found = replace(found, device="GPU-1", gpu=0)
    return replace(
        full,
        devices=(DeviceSample(device, TIME, values, processes=idle),),
        ranks=(
            rank(0, job='a"b\\c\nd'),
            # Owners of the same job and rank, and another run, which is counted only.
            *(rank(0), rank(0, owner="uid/7", steps_total=7), rank(0, run="r2")),
            rank(1, **ours, energy_j=5.0, parallel={"pipeline": (3, 4)}, step_clock="lightning"),
            rank(2, status="exited", run="r0", energy_j=5.0),
            rank(3, gc_s=None, gc_collections_total=None, allocation_retries_total=None),
            *_MORE_RANKS,
        ),
        # The first run is the live one; the energy of the other job is not known.
        jobs=(
            *(replace(full.jobs[0], run=run, world_size=n) for run, n in (("r1", 2), ("r0", 8))),
            JobState("other", 1, ("0",)),
            *_MORE_JOBS,
        ),
        # The scrape names an agent's node, which an empty label would hide; a fleet's is its own.
        anomalies=(
            *(found, replace(found, id="a4", kind="hang", rank=0, node="gpu-7")),
            replace(found, id="a5", kind="crash", judged_by="fleet"),
        ),
        captures=(*full.captures, *_MORE_CAPTURES),
        attributions=(*full.attributions, *_MORE_ATTRIBUTIONS),
        sensitivities=_SENSITIVITIES,
    )


def mig_state() -> State:
    """Return the state of a GPU with instances and XIDs, at whose index a lost GPU was before."""
    (parent,) = simulated(1)
    values = dict(parent.values)
    for xid, seen in (("79", TIME - 9), ("31", TIME - 1)):
        values["device_xid_errors_total", (xid,)] = 1
        values["device_xid_last_timestamp_seconds", (xid,)] = seen
    about: dict[str, Any] = {"profile": "1g.10gb", "info": {"parent_uuid": parent.device.uuid}}
    used: dict[SeriesKey, float] = {("device_memory_used_bytes", ()): 3 * 2**30}
    instances = [
        DeviceSample(
            Device(f"MIG-{i}", 0, "H100 MIG 1g.10gb", gpu_instance=gi, **about), TIME, used
        )
        # The last two are compute instances of one GPU instance.
        for i, gi in enumerate(("7", "9", "9"))
    ]
    lost = DeviceSample(Device("GPU-lost", 0, "x"), TIME, up=False, reason="lost")
    # A sum with only one of its two parts is left out.
    del values["device_nvlink_receive_bytes_per_second", ()]
    held = {name: (Workload("ml", name, "c"),) for name in ("MIG-0", parent.device.uuid)}
    devices = (replace(parent, values=values), *instances, lost)
    return State(TIME, "1", "host-1", devices, attributions=(Attribution("kubelet", TIME, held),))
