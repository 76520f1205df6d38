"""Reads one device through NVML: its handle, its readers, and the meaning of their errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pynvml

from warpwatch_devices.nvml.counters import (
    BUSY_SECONDS,
    PCIE_BYTES,
    Integral,
    PcieBytes,
    busy_samples,
    energy_samples,
)
from warpwatch_devices.nvml.events import EventPoller, GpuEvents
from warpwatch_devices.nvml.fields import Parts
from warpwatch_devices.nvml.gpm import Gpm, GpmTurns
from warpwatch_devices.nvml.library import (
    CallCosts,
    DeviceGone,
    LibraryGone,
    classify,
    count_fans,
    identify,
    read_facts,
    reason_of,
)
from warpwatch_devices.nvml.mig import MigDevices
from warpwatch_devices.nvml.processes import GpuProcessReader
from warpwatch_devices.nvml.readers import MIG_MODE, UTILIZATION, ReaderSchedule, readers_of
from warpwatch_devices.source import DeviceSink
from warpwatch_devices.xids import XidLedger
from warpwatch_telemetry.metric import SeriesKey, Values
from warpwatch_telemetry.samples import Device, DeviceSample

logger = logging.getLogger(__name__)

# A removed device is not called for this time.
PROBE_INTERVAL_S = 10.0

# GPM's rates, integrated, replace these counters only on devices without the fields.
_NVLINK_OF_GPM: dict[SeriesKey, int] = {
    ("device_nvlink_receive_bytes_total", ()): pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
    ("device_nvlink_transmit_bytes_total", ()): pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
}


@dataclass(slots=True)
class DeviceMemory:
    """What outlives the handles and sessions of one GPU.

    ``denied``: the readers already reported as not permitted. ``parts``: as for FieldBatch.
    """

    busy: Integral = field(default_factory=Integral)
    energy: Integral = field(default_factory=Integral)
    pcie_bytes: PcieBytes = field(default_factory=PcieBytes)
    parts: Parts = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """The objects that the devices of one NVML session share. ``memories``: by UUID."""

    sink: DeviceSink
    ledger: XidLedger
    events: EventPoller
    memories: dict[str, DeviceMemory]
    gpm: GpmTurns
    monotonic: Callable[[], float]
    wall: Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Access:
    """What reads a device through one handle, in one MIG mode.

    ``lacks`` returns whether the device lacks a field.
    """

    handle: Any
    schedule: ReaderSchedule
    lacks: Callable[[int], bool]
    processes: GpuProcessReader
    gpm: Gpm
    events: GpuEvents


class NvmlDevice:
    """The device at ``index``. Only its own loop calls ``step``; the watchdog reads the rest.

    ``settled``: it is read, so that all its MIG devices are known. ``stuck``: the watchdog has
    reported that ``step`` does not return. ``replaced``: another device is at its index.
    """

    def __init__(self, index: int, context: DeviceContext, interval_s: float) -> None:
        # The key of a device whose UUID has not been read yet.
        self.device = Device(uuid=f"unknown-{index}", index=index, name="")
        self.library_gone = False
        self.replaced = False
        self.settled = False
        self.stuck = False
        self.reason = ""
        self.costs = CallCosts()
        self._context = context
        self._monotonic, self._wall = context.monotonic, context.wall
        self._index = index
        self._interval_s = interval_s
        self._probe_at = 0.0
        self._memory = DeviceMemory()
        self._events: GpuEvents | None = None
        self._access: _Access | None = None
        self._read_at: float | None = None
        self._make_gpm = partial(Gpm, context.gpm, self.costs, interval_s, self._monotonic)
        self._mig = MigDevices(context.sink, self._make_gpm, self.costs, interval_s)
        self._mig_mode = 0.0

    @property
    def known(self) -> bool:
        """Whether its UUID and name have been read."""
        return bool(self.device.name)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The GPU and its MIG devices."""
        return (self.device, *self._mig.devices)

    def step(self) -> None:
        """Read the device once and publish the result."""
        self.stuck = False
        if self.library_gone:
            return
        if self.reason and self._monotonic() < self._probe_at:
            self._publish_down()
            return
        try:
            self._read(self._access or self._open())
            self.reason = ""
            self.settled = True
        except LibraryGone:
            self.library_gone = True
            self.reason = "driver"
            self._publish_down()
        except DeviceGone as gone:
            self._give_up(str(gone))

    def publish_stuck(self) -> None:
        """Report the device as stuck; for the watchdog, while ``step`` does not return."""
        self.stuck = True
        self._context.gpm.end(self.device.uuid)
        self._publish_down("stuck")

    def close(self) -> None:
        """Free what NVML has allocated; only while ``step`` does not run."""
        self._mig.close()
        access, self._access = self._access, None
        if access is not None:
            access.gpm.close()

    def _publish_down(self, reason: str = "") -> None:
        now = self._wall()
        for device in self.devices:
            values = self._context.ledger.values(device.uuid)
            sample = DeviceSample(device, now, values, up=False, reason=reason or self.reason)
            self._context.sink.publish_device(sample)

    def _give_up(self, reason: str) -> None:
        if reason != self.reason:
            logger.warning("device %s (%s): %s", self._index, self.device.uuid, reason)
        self.reason = reason
        self.settled = False
        self._probe_at = self._monotonic() + PROBE_INTERVAL_S
        self.close()
        self._publish_down()

    def _open(self) -> _Access:
        """Get the handle and read the facts. Raises DeviceGone, LibraryGone."""
        try:
            handle = self.costs.measure("facts", pynvml.nvmlDeviceGetHandleByIndex, self._index)
            uuid, name = identify(handle, self.costs)
        except pynvml.NVMLError as error:
            raise DeviceGone(reason_of(classify(error))) from error
        if self.known and uuid != self.device.uuid:
            self.replaced = True
            raise DeviceGone("lost")
        facts = read_facts(handle, self.costs)
        if not self.known:
            self._context.sink.forget_device(self.device.uuid)
        self.device = Device(uuid=uuid, index=self._index, name=name, info=facts)
        self._memory = self._context.memories.setdefault(uuid, DeviceMemory())
        self._mig.find_again()
        return self._prepare(handle, self._renewed_events())

    def _renewed_events(self) -> GpuEvents:
        if self._events is None:
            # If the address cannot be read, the UUID identifies the GPU.
            address = self.device.info.get("pci_bus_id", self.device.uuid)
            context = self._context
            self._events = GpuEvents(self.device.uuid, address, context.ledger, self.costs)
            context.events.add(self._events)
        self._events.renew()
        return self._events

    def _prepare(self, handle: Any, events: GpuEvents) -> _Access:
        """Create all readers again: support differs by driver and by MIG mode."""
        memory, clocks = self._memory, (self._wall, self._monotonic)
        readers, lacks = readers_of(
            self.device.info.get("driver_version", ""),
            count_fans(handle, self.costs),
            busy_samples(memory.busy, self._wall).read,
            energy_samples(memory.energy, self._wall).read,
            memory.parts,
        )
        shared = (self.costs, lacks, memory.denied, self._interval_s, self._monotonic)
        self._access = _Access(
            handle,
            ReaderSchedule(readers, self._index, *shared),
            lacks,
            GpuProcessReader(self.costs, self._index, self._interval_s, *clocks),
            self._make_gpm(self.device.uuid, handle),
            events,
        )
        return self._access

    def _read(self, access: _Access) -> None:
        now = self._wall()
        values = access.schedule.read(access.handle)
        # After a good reading, since a registration takes calls of its own.
        access.events.register(access.handle, self._monotonic())
        self._integrate(values, access.schedule)
        # A missing value means no change.
        mig_mode = values.get(MIG_MODE, self._mig_mode)
        if mig_mode != self._mig_mode:
            access = self._change_mig_mode(mig_mode, access)
        processes = access.processes
        processes.read(access.handle)
        # Before the GPU is published, as the instances' processes may have to be queried.
        instances: tuple[DeviceSample, ...] = ()
        if self._mig_mode:
            instances = tuple(self._mig.read(self.device, access.handle, now, processes))
        processes.keep_instances(self._mig.instance_ids)
        self._add_gpm(values, access)
        values.update(self._context.ledger.values(self.device.uuid))
        if self.stuck:
            # A call has returned late: these values, and their time, are from before it.
            return
        publish = self._context.sink.publish_device
        on_gpu = processes.of_gpu(self._mig.instance_ids)
        publish(DeviceSample(self.device, now, values, processes=on_gpu))
        for sample in instances:
            publish(sample)

    def _change_mig_mode(self, mode: float, access: _Access) -> _Access:
        self._mig_mode = mode
        if not mode:
            self._mig.clear()
        access.gpm.close()
        return self._prepare(access.handle, access.events)

    def _add_gpm(self, values: Values, access: _Access) -> None:
        gpm = access.gpm.read()
        # A GPU has no GPM of its own while it is in MIG mode.
        self._memory.pcie_bytes.count(values, gpm if access.gpm.supported else None)
        for key, value in gpm.items():
            number = _NVLINK_OF_GPM.get(key)
            if key not in PCIE_BYTES and (number is None or access.lacks(number)):
                values[key] = value

    def _integrate(self, values: Values, schedule: ReaderSchedule) -> None:
        """Integrate the utilization of devices without sample buffers into busy time.

        A gap of more than three intervals adds nothing.
        """
        now = self._monotonic()
        before, self._read_at = self._read_at, now
        busy_ratio = values.get(UTILIZATION)
        if busy_ratio is None or schedule.has("utilization_samples"):
            return
        busy = self._memory.busy
        if before is not None and now - before <= 3 * self._interval_s:
            busy.total += busy_ratio * (now - before)
        values[BUSY_SECONDS] = round(busy.total, 6)
