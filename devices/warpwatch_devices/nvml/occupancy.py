"""Who is on a device: the process lists and shares of one GPU, each read as seldom as will do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pynvml

from warpwatch_devices.nvml.costs import CallCosts
from warpwatch_devices.nvml.library import Meaning, judge
from warpwatch_devices.nvml.processes import (
    COMPUTE,
    GRAPHICS,
    MPS,
    Occupant,
    ProcessList,
    ProcessNames,
    ProcessUse,
    describe,
)
from warpwatch_devices.nvml.tiers import SLOW_S, rounds_of
from warpwatch_telemetry.samples import DeviceProcess

_PERIOD_S = 2.0
_FINAL = (Meaning.UNSUPPORTED, Meaning.NO_PERMISSION)
# A process on a GPU instance: GPU instance, compute instance.
InstanceIds = tuple[int, int]


class Occupancy:
    """The processes of one GPU and of its MIG devices, from one list for all of them.

    Where that list is not permitted, ``by_instance`` says that each MIG device must be asked.
    ``clocks``: as of ProcessUse.
    """

    def __init__(
        self, costs: CallCosts, phase: int, interval_s: float, *clocks: Callable[[], float]
    ) -> None:
        self.by_instance = False
        self._costs = costs
        self._phase = phase
        self._round = 0
        self._rounds = rounds_of(_PERIOD_S, interval_s)
        self._slow_rounds = rounds_of(SLOW_S, interval_s)
        self._lists = {name: ProcessList(name) for name in (COMPUTE, MPS, GRAPHICS)}
        self._instances: dict[str, InstanceIds] = {}
        self._found: dict[str, tuple[Occupant, ...]] = {}
        self._use: ProcessUse | None = ProcessUse(*clocks)
        self._shares: dict[int, float] | None = None
        self._names = ProcessNames()

    def read(self, handle: Any) -> None:
        """Read what is due in this round. Raises LibraryGone, DeviceGone."""
        turn = self._round + self._phase
        first = self._round == 0
        self._round += 1
        if first or turn % self._rounds == 0:
            self._list(COMPUTE, handle)
            self._names.keep({occupant.pid for occupant in self._all})
            if any(self._found.values()):
                self._share(handle)
        if first or turn % self._slow_rounds == 0:
            self._list(MPS, handle)
            self._list(GRAPHICS, handle)

    def of_gpu(self, instances: Iterable[InstanceIds] = ()) -> tuple[DeviceProcess, ...]:
        """Who is on the GPU and on none of these instances."""
        instance_ids = set(instances)
        return self._describe(o for o in self._all if _ids_of(o) not in instance_ids)

    def of_instance(self, ids: InstanceIds) -> tuple[DeviceProcess, ...]:
        return self._describe(o for o in self._all if _ids_of(o) == ids)

    def read_instance(self, handle: Any, ids: InstanceIds) -> None:
        """The list of one MIG device, where the GPU's own is not permitted."""
        name = f"{COMPUTE} {ids}"
        process_list = self._lists.get(name) or ProcessList(COMPUTE)
        self._lists[name] = process_list
        self._instances[name] = ids
        self._list(name, handle)
        # Asked of a MIG device, they are on it, whatever else they say.
        found = self._found.get(name, ())
        self._found[name] = tuple(Occupant(o.pid, o.memory_bytes, *ids) for o in found)

    def keep_instances(self, instance_ids: Iterable[InstanceIds]) -> None:
        """Of those that were taken down there is no handle to ask who is on them."""
        kept = set(instance_ids)
        for name, ids in tuple(self._instances.items()):
            if ids not in kept:
                del self._instances[name]
                self._lists.pop(name, None)
                self._found.pop(name, None)

    @property
    def _all(self) -> Iterable[Occupant]:
        return (occupant for found in self._found.values() for occupant in found)

    def _describe(self, occupants: Iterable[Occupant]) -> tuple[DeviceProcess, ...]:
        return describe(occupants, self._shares, self._names)

    def _list(self, name: str, handle: Any) -> None:
        process_list = self._lists.get(name)
        if process_list is None:
            return
        self._found.pop(name, None)
        try:
            self._found[name] = self._costs.measure("processes", process_list.read, handle)
        except pynvml.NVMLError as error:
            meaning = judge(error)
            if meaning in _FINAL:
                del self._lists[name]
                self.by_instance = self.by_instance or name == COMPUTE

    def _share(self, handle: Any) -> None:
        if self._use is None:
            return
        self._shares = None
        try:
            self._shares = self._costs.measure("process_utilization", self._use.read, handle)
        except pynvml.NVMLError as error:
            if judge(error) in _FINAL:
                self._use = None


def _ids_of(occupant: Occupant) -> InstanceIds:
    return (occupant.gpu_instance, occupant.compute_instance)
