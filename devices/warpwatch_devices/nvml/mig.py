"""Reads the MIG devices of a GPU, in the loop of that GPU.

Memory and hardware counters belong to a GPU instance, so only its lowest compute instance reports
them. Handles die with their instances, so instances are searched again every few rounds, and after
a call has failed. The instances take turns with their slow queries (``_round + number``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pynvml

from warpwatch_devices.nvml.gpm import Gpm
from warpwatch_devices.nvml.library import CallCosts, classify, code_of
from warpwatch_devices.nvml.processes import GpuProcessReader, InstanceIds
from warpwatch_devices.nvml.readers import SLOW_S, memory_reader, rounds_of
from warpwatch_devices.source import DeviceSink
from warpwatch_telemetry.metric import Values
from warpwatch_telemetry.samples import Device, DeviceSample

MEMORY_PERIOD_S = 2.0
_NEVER = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION)
# Codes of an empty slot. Any other code may differ the next time.
_ABSENT = (
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
)


class _NoAnswer(Exception):
    """Raised if it is unknown this time whether there is a MIG device."""


@dataclass(slots=True, eq=False)
class _Instance:
    """A compute instance; the lowest one of a GPU instance leads: it has ``gpm`` and memory.

    ``memory`` is None until it is read; ``unreadable``: the driver never returns it.
    """

    device: Device
    handle: Any
    slot: int
    ids: InstanceIds
    gpm: Gpm | None = None
    unreadable: bool = False
    memory: Values | None = None

    def close(self) -> None:
        gpm, self.gpm = self.gpm, None
        if gpm is not None:
            gpm.close()


class MigDevices:
    """The MIG devices of one GPU. Only its loop calls; the watchdog reads ``devices``.

    ``make_gpm`` gets the UUID and handle of the GPU, and the id of the GPU instance.
    """

    def __init__(
        self, sink: DeviceSink, make_gpm: Callable[..., Gpm], costs: CallCosts, interval_s: float
    ) -> None:
        self.devices: tuple[Device, ...] = ()
        self._memory_of = memory_reader()
        self._sink = sink
        self._make_gpm = make_gpm
        self._costs = costs
        self._instances: dict[str, _Instance] = {}
        self._round = 0
        self._memory_rounds = rounds_of(MEMORY_PERIOD_S, interval_s)
        self._slow_rounds = rounds_of(SLOW_S, interval_s)
        self._stale = True

    @property
    def instance_ids(self) -> tuple[InstanceIds, ...]:
        return tuple(instance.ids for instance in self._instances.values())

    def read(
        self, parent: Device, handle: Any, time_s: float, processes: GpuProcessReader
    ) -> Iterator[DeviceSample]:
        """Yield a sample of each device. Raises LibraryGone, DeviceGone."""
        if self._stale or self._round % self._slow_rounds == 0:
            self._find(parent, handle)
        for number, instance in enumerate(self._instances.values()):
            if (self._round + number) % self._memory_rounds == 0 or instance.memory is None:
                self._read_memory(instance)
            if processes.by_instance and (self._round + number) % self._slow_rounds == 0:
                processes.read_instance(instance.handle, instance.ids)
        self._round += 1
        for instance in self._instances.values():
            yield self._sample(instance, time_s, processes)

    def find_again(self) -> None:
        """Search again in the next round, as handles may have died."""
        self._stale = True

    def clear(self) -> None:
        """Remove all devices, as MIG was turned off."""
        for uuid in tuple(self._instances):
            self._forget(uuid)
        self.devices = ()
        self._round = 0

    def close(self) -> None:
        """Free what NVML has allocated."""
        for instance in self._instances.values():
            instance.close()

    def _sample(
        self, instance: _Instance, time_s: float, processes: GpuProcessReader
    ) -> DeviceSample:
        values = dict(instance.memory or {})
        if instance.gpm is not None:
            values.update(instance.gpm.read())
        on_instance = processes.of_instance(instance.ids)
        return DeviceSample(instance.device, time_s, values, processes=on_instance)

    def _read_memory(self, instance: _Instance) -> None:
        instance.memory = {}
        if instance.gpm is None or instance.unreadable:
            return
        try:
            instance.memory = self._costs.measure("mig_memory", self._memory_of, instance.handle)
        except pynvml.NVMLError as error:
            classify(error)
            instance.unreadable = code_of(error) in _NEVER
            # Any other error may come from a handle that has died.
            self._stale = self._stale or not instance.unreadable

    def _find(self, parent: Device, handle: Any) -> None:
        """Find the instances, and forget those that were removed."""
        self._stale = False
        try:
            slots = self._ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
        except _NoAnswer:
            self._stale = True
            return
        found: dict[str, _Instance] = {}
        for slot in range(slots):
            instance = self._instance_in(slot, parent, handle)
            if instance is not None:
                found[instance.device.uuid] = instance
        for uuid in self._instances.keys() - found.keys():
            self._forget(uuid)
        self._instances = found
        self.devices = tuple(instance.device for instance in found.values())
        self._choose_leaders(parent.uuid, handle)

    def _instance_in(self, slot: int, parent: Device, parent_handle: Any) -> _Instance | None:
        """Return the instance in a slot, None for an empty slot, the last one if unknown."""
        try:
            handle = self._ask(
                lambda parent: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, slot),
                parent_handle,
            )
            uuid = None if handle is None else self._ask(pynvml.nvmlDeviceGetUUID, handle)
            if uuid is None:
                return None
            known = self._instances.get(uuid)
            if known is None:
                known = self._describe(uuid, slot, handle, parent)
            if known is not None:
                known.handle = handle
            return known
        except _NoAnswer:
            self._stale = True
            return next((i for i in self._instances.values() if i.slot == slot), None)

    def _ask(self, call: Any, handle: Any) -> Any:
        """Return the reply, or None without a device. Raises _NoAnswer, LibraryGone, DeviceGone."""
        try:
            return self._costs.measure("mig", call, handle)
        except pynvml.NVMLError as error:
            if code_of(error) in _ABSENT:
                return None
            classify(error)
            raise _NoAnswer from error

    def _ask_detail(self, call: Any, handle: Any) -> Any:
        """Return the reply, or None."""
        try:
            return self._ask(call, handle)
        except _NoAnswer:
            return None

    def _describe(self, uuid: str, slot: int, handle: Any, parent: Device) -> _Instance | None:
        gpu_instance = self._ask(pynvml.nvmlDeviceGetGpuInstanceId, handle)
        compute_instance = self._ask(pynvml.nvmlDeviceGetComputeInstanceId, handle)
        if gpu_instance is None or compute_instance is None:
            return None
        name = self._ask_detail(pynvml.nvmlDeviceGetName, handle) or parent.name
        device = Device(
            uuid=uuid,
            index=parent.index,
            name=name,
            gpu_instance=str(gpu_instance),
            profile=self._profile(name, handle),
            info={**parent.info, "parent_uuid": parent.uuid, "mig_index": str(slot)},
        )
        return _Instance(device, handle, slot, (gpu_instance, compute_instance))

    def _profile(self, name: str, handle: Any) -> str:
        """Return 1g.10gb, or 1c.3g.40gb for a part of a GPU instance."""
        _, found, profile = name.rpartition("MIG ")
        if found:
            return profile
        sizes = self._ask_detail(pynvml.nvmlDeviceGetAttributes_v2, handle)
        if sizes is None:
            return ""
        slices, part = sizes.gpuInstanceSliceCount, sizes.computeInstanceSliceCount
        whole = f"{slices}g.{math.ceil(sizes.memorySizeMB / 1024)}gb"
        return whole if part == slices else f"{part}c.{whole}"

    def _choose_leaders(self, parent_uuid: str, parent_handle: Any) -> None:
        """Let the lowest compute instance report memory and hardware counters, and no other."""
        lowest: dict[int, _Instance] = {}
        for instance in sorted(self._instances.values(), key=lambda one: one.ids, reverse=True):
            lowest[instance.ids[0]] = instance
        for instance in self._instances.values():
            leads = instance is lowest[instance.ids[0]]
            if leads and instance.gpm is None:
                instance.memory = None
                instance.gpm = self._make_gpm(parent_uuid, parent_handle, instance.ids[0])
            elif not leads and instance.gpm is not None:
                instance.memory = None
                instance.close()

    def _forget(self, uuid: str) -> None:
        self._instances.pop(uuid).close()
        self._sink.forget_device(uuid)
