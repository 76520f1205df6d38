"""Reads one device through NVML: its handle, its readers, and the meaning of their errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pynvml

from warpwatch_devices.nvml.events import EventWatcher
from warpwatch_devices.nvml.facts import count_fans, identify, read_facts
from warpwatch_devices.nvml.fields import Parts
from warpwatch_devices.nvml.gpm import GpmWorker
from warpwatch_devices.nvml.library import CallCosts, DeviceGone, LibraryGone, classify, reason_of
from warpwatch_devices.nvml.mig import MigDevices
from warpwatch_devices.nvml.processes import GpuProcessReader
from warpwatch_devices.nvml.readers import MIG_MODE, UTILIZATION, readers_of
from warpwatch_devices.nvml.sample_buffers import (
    BUSY_SECONDS,
    Integral,
    busy_samples,
    energy_samples,
)
from warpwatch_devices.nvml.tiers import Schedule
from warpwatch_devices.source import DeviceSink
from warpwatch_devices.xid_ledger import XidLedger
from warpwatch_telemetry.metric import SeriesKey, Values
from warpwatch_telemetry.samples import Device, DeviceSample

logger = logging.getLogger(__name__)

PCIE_BYTES: tuple[SeriesKey, ...] = (
    ("device_pcie_receive_bytes_total", ()),
    ("device_pcie_transmit_bytes_total", ()),
)
_GENERATION: SeriesKey = ("device_pcie_link_generation_max", ())
_WIDTH: SeriesKey = ("device_pcie_link_width_max_lanes", ())
_WRAP = 2**32
# 2.5 GT/s with 8 bits of 10 (PCI Express Base Specification 1.1). No generation more than doubles
# the one before.
_FIRST_LANE_BYTES_PER_S = 250_000_000
# After this many rounds without GPM the fields are counted, if possible.
PATIENCE_ROUNDS = 10


class ContinuedCounter:
    """A total of what several counters count, one at a time."""

    def __init__(self) -> None:
        self._total: float | None = None
        self._newest: tuple[str, float] = ("", 0.0)

    def total(self, source: str, raw: float, wrap: int = 0) -> float:
        """Add the growth of ``source`` since its last reading.

        The growth is unknown after a change of source. wrap: where the counter starts over. A
        counter without it that falls has started again.
        """
        last_source, before = self._newest
        self._newest = (source, raw)
        if self._total is None:
            self._total = raw
        elif last_source == source:
            self._total += _growth(before, raw, wrap)
        return self._total

    def interrupt(self) -> None:
        """Ignore the growth up to the next reading."""
        self._newest = ("", 0.0)


def _growth(before: float, now: float, wrap: int) -> float:
    if now >= before:
        return now - before
    return now - before + wrap if wrap else now


class PcieBytes:
    """The PCIe byte counters of a GPU: from GPM's rates if it has them, else from two fields.

    The fields may have 32 bits only, which a fast link fills several times per second. So such a
    field counts only if the link cannot carry that much between two readings. Totals outlive
    handles, and continue when their source changes.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._counters = {key: ContinuedCounter() for key in PCIE_BYTES}
        self._wide = False
        self._rounds_without = PATIENCE_ROUNDS

    def begin(self) -> None:
        """Start again after a new handle or MIG mode, since GPM may be gone or back."""
        self._rounds_without = PATIENCE_ROUNDS
        if not self._wide:
            for counter in self._counters.values():
                counter.interrupt()

    def count(self, values: Values, gpm: Mapping[SeriesKey, float]) -> None:
        """Replace the values of the fields by totals, or remove them if these are unknown."""
        fields = {key: values.pop(key) for key in PCIE_BYTES if key in values}
        self._wide = self._wide or any(raw >= _WRAP for raw in fields.values())
        if any(key in gpm for key in PCIE_BYTES):
            self._rounds_without = 0
            rates = {key: gpm[key] for key in PCIE_BYTES if key in gpm}
            values.update({k: self._counters[k].total("gpm", v) for k, v in rates.items()})
            return
        self._rounds_without += 1
        if self._rounds_without <= PATIENCE_ROUNDS or not self._countable(values):
            return
        wrap = 0 if self._wide else _WRAP
        values.update({k: self._counters[k].total("fields", v, wrap) for k, v in fields.items()})

    def _countable(self, values: Values) -> bool:
        """Return whether the fields cannot start over more than once between two readings."""
        if self._wide:
            return True
        generation, lanes = values.get(_GENERATION), values.get(_WIDTH)
        if generation is None or lanes is None:
            return False
        bytes_per_s = _FIRST_LANE_BYTES_PER_S * 2 ** (generation - 1) * lanes
        return bytes_per_s * self._interval_s < _WRAP


# A removed device is not called for this time.
PROBE_INTERVAL_S = 10.0

# GPM's rates, integrated, replace these counters only on devices without the fields.
_NVLINK_OF_GPM: dict[SeriesKey, int] = {
    ("device_nvlink_receive_bytes_total", ()): pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
    ("device_nvlink_transmit_bytes_total", ()): pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
}


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """The objects that the devices of one NVML session share."""

    sink: DeviceSink
    ledger: XidLedger
    events: EventWatcher
    gpm: GpmWorker
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class NvmlDevice:
    """The device at ``index``. Only its own loop calls ``step``; the watchdog reads ``devices``."""

    def __init__(self, index: int, context: DeviceContext, interval_s: float) -> None:
        # The key of a device whose UUID has not been read yet.
        self.device = Device(uuid=f"unknown-{index}", index=index, name="")
        self.library_gone = False
        self.reason = ""
        self.costs = CallCosts()
        self._context = context
        self._monotonic, self._wall = context.monotonic, context.wall
        self._index = index
        self._interval_s = interval_s
        self._probe_at = 0.0
        self._handle: Any = None
        self._handle_valid = True
        self._denied: set[str] = set()
        self._busy, self._energy = Integral(), Integral()
        self._pcie_bytes = PcieBytes(interval_s)
        self._parts: Parts = {}
        self._read_at: float | None = None
        self._mig = MigDevices(context.sink, context.gpm, self.costs, interval_s)
        self._mig_mode = 0.0
        self._settled = False
        self._watched = False
        self._reported_stuck = False

    @property
    def known(self) -> bool:
        """Whether its UUID and name have been read."""
        return bool(self.device.name)

    @property
    def settled(self) -> bool:
        """Whether it is read, so that all its MIG devices are known."""
        return self._settled

    @property
    def devices(self) -> tuple[Device, ...]:
        """The GPU and its MIG devices."""
        return (self.device, *self._mig.devices)

    def move(self, index: int) -> None:
        """Set a new index after devices came or went; handles may have died."""
        self._index = index
        self._handle_valid = False

    def step(self) -> None:
        """Read the device once and publish the result."""
        self._reported_stuck = False
        if self.library_gone:
            return
        if self.reason and self._monotonic() < self._probe_at:
            self._publish_down()
            return
        try:
            if self._handle is None or not self._handle_valid:
                self._open()
            self._read()
            self.reason = ""
            self._settled = True
        except LibraryGone:
            self.library_gone = True
            self.reason = "driver"
            self._publish_down()
        except DeviceGone as gone:
            self._give_up(str(gone))

    def publish_stuck(self) -> None:
        """Report the device as stuck; for the watchdog, while ``step`` does not return."""
        self._reported_stuck = True
        self._publish_down("stuck")

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
        self._settled = False
        self._probe_at = self._monotonic() + PROBE_INTERVAL_S
        self._handle = None
        self._publish_down()

    def _open(self) -> None:
        """Get the handle and read the facts. Raises DeviceGone, LibraryGone."""
        self._handle_valid = True
        try:
            handle = self.costs.measure("facts", pynvml.nvmlDeviceGetHandleByIndex, self._index)
            uuid, name = identify(handle, self.costs)
        except pynvml.NVMLError as error:
            raise DeviceGone(reason_of(classify(error))) from error
        if self.known and uuid != self.device.uuid:
            # Another device is at this index; the session will assign it.
            raise DeviceGone("lost")
        facts = read_facts(handle, self.costs)
        self._fans = count_fans(handle, self.costs)
        if not self.known:
            self._context.sink.forget_device(self.device.uuid)
        self.device = Device(uuid=uuid, index=self._index, name=name, info=facts)
        self._handle = handle
        self._mig.find_again()
        self._prepare()
        self._watched = False

    def _prepare(self) -> None:
        """Create all readers again: support differs by driver and by MIG mode."""
        clocks = (self._wall, self._monotonic)
        readers, self._supports = readers_of(
            self.device.info.get("driver_version", ""),
            self._fans,
            busy_samples(self._busy, *clocks).read,
            energy_samples(self._energy, *clocks).read,
            self._parts,
        )
        self._schedule = Schedule(
            *(readers, self._index, self.costs, self._supports, self._denied, self._interval_s),
            monotonic=self._monotonic,
        )
        self._processes = GpuProcessReader(self.costs, self._index, self._interval_s, *clocks)
        self._read_at = None
        self._pcie_bytes.begin()
        # A GPU has no GPM of its own while it is in MIG mode.
        self._context.gpm.add(self.device.uuid, self._handle)

    def _read(self) -> None:
        now = self._wall()
        values = self._schedule.read(self._handle)
        if not self._watched:
            self._watch()
        self._integrate(values)
        self._processes.read(self._handle)
        # A missing value means no change.
        mig_mode = values.get(MIG_MODE, self._mig_mode)
        if mig_mode != self._mig_mode:
            self._change_mig_mode(mig_mode)
        # Before the GPU is published, as the instances' processes may have to be queried.
        instances: tuple[DeviceSample, ...] = ()
        if self._mig_mode:
            instances = tuple(self._mig.read(self.device, self._handle, now, self._processes))
        self._processes.keep_instances(self._mig.instance_ids)
        self._add_gpm(values)
        values.update(self._context.ledger.values(self.device.uuid))
        processes = self._processes.of_gpu(self._mig.instance_ids)
        if self._reported_stuck:
            # A call has returned late: these values, and their time, are from before it.
            return
        publish = self._context.sink.publish_device
        publish(DeviceSample(self.device, now, values, processes=processes))
        for sample in instances:
            publish(sample)

    def _watch(self) -> None:
        """Register events after the first good reading, since that takes calls of its own."""
        self._watched = True
        # If the address cannot be read, the UUID identifies the GPU.
        address = self.device.info.get("pci_bus_id", self.device.uuid)
        self._context.events.register(self.device.uuid, address, self._handle)

    def _change_mig_mode(self, mode: float) -> None:
        self._mig_mode = mode
        if not mode:
            self._mig.clear()
        self._prepare()

    def _add_gpm(self, values: Values) -> None:
        gpm = self._context.gpm.values(self.device.uuid)
        self._pcie_bytes.count(values, gpm)
        for key, value in gpm.items():
            number = _NVLINK_OF_GPM.get(key)
            if key not in PCIE_BYTES and (number is None or self._supports(number) is False):
                values[key] = value

    def _integrate(self, values: Values) -> None:
        """Integrate the utilization of devices without sample buffers into busy time.

        A gap of more than three intervals adds nothing.
        """
        now = self._monotonic()
        before, self._read_at = self._read_at, now
        busy_ratio = values.get(UTILIZATION)
        if busy_ratio is None or self._schedule.has("utilization_samples"):
            return
        if before is not None and now - before <= 3 * self._interval_s:
            self._busy.total += busy_ratio * (now - before)
        values[BUSY_SECONDS] = round(self._busy.total, 6)
