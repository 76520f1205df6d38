"""The seam to DCGM's own Python bindings: nothing else touches them.

They come with DCGM's packages, not from PyPI, and are imported only where the source is enabled.
Names and types are those of NVIDIA/DCGM testing/python3 (pydcgm, dcgm_agent, dcgm_structs,
dcgm_fields). Only what reads is called, and Pause and Resume of profiling.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from warpwatch_telemetry.samples import Device

# Where the packages of DCGM 4 and of DCGM 2 and 3 put the bindings.
FOLDERS = (
    Path("/usr/share/datacenter-gpu-manager-4/bindings/python3"),
    Path("/usr/local/dcgm/bindings/python3"),
    Path("/usr/local/dcgm/bindings"),
)
EMBEDDED = "embedded"

# DcgmEntityStatusLost and DcgmEntityStatusDetached, for which the public bindings have no name.
_GONE = (4, 7)
# The history that the host engine keeps; only the newest value is read.
_KEPT_INTERVALS = 3
# Names of groups are unique within a host engine.
_NAMES = itertools.count(1)

# DCGM_ST_* that concern a GPU or a feature. Any other error ends the connection.
_OF_A_GPU = (
    "COMPUTE_INSTANCE_NOT_FOUND",
    "GPU_IS_LOST",
    "GPU_NOT_SUPPORTED",
    "GROUP_INCOMPATIBLE",
    "GROUP_IS_EMPTY",
    "INSTANCE_NOT_FOUND",
    "INSUFFICIENT_DRIVER_VERSION",
    "IN_USE",
    "MODULE_NOT_LOADED",
    "NOT_SUPPORTED",
    "NOT_WATCHED",
    "NO_DATA",
    "NO_PERMISSION",
    "NVML_ERROR",
    "PROFILING_LIBRARY_ERROR",
    "PROFILING_MULTI_PASS",
    "PROFILING_NOT_SUPPORTED",
    "REQUIRES_ROOT",
    "RESET_REQUIRED",
    "STALE_DATA",
)


class DcgmUnavailable(Exception):
    """The host engine cannot be used now; the text says in one line what is missing."""


class DcgmRefused(Exception):
    """The host engine does not do this for this GPU; everything else goes on."""


class FieldValue(NamedTuple):
    """A value in DCGM's unit; ``time`` is the host engine's wall clock in seconds."""

    value: float
    time: float


@dataclass(frozen=True, slots=True)
class Entity:
    """A GPU of DCGM, or a GPU instance of one. ``device`` has the GPU's UUID in both cases."""

    kind: int
    id: int
    gpu_id: int
    device: Device


@dataclass(frozen=True, slots=True)
class Bindings:
    """The modules of DCGM's bindings."""

    pydcgm: Any
    agent: Any
    fields: Any
    structs: Any

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Translate the bindings' errors. Besides DCGMError they raise Exception itself."""
        try:
            yield
        except (DcgmRefused, DcgmUnavailable):
            raise
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            if getattr(error, "value", None) in self._codes_of_a_gpu():
                raise DcgmRefused(text) from error
            raise DcgmUnavailable(text) from error

    def _codes_of_a_gpu(self) -> set[int]:
        named = (getattr(self.structs, f"DCGM_ST_{name}", None) for name in _OF_A_GPU)
        return {code for code in named if code is not None}


def load(folder: Path | None) -> Bindings:
    """Import the bindings from ``folder``, else from where DCGM's packages put them.

    Raises DcgmUnavailable.
    """
    found = next((f for f in ([folder] if folder else FOLDERS) if (f / "pydcgm.py").exists()), None)
    if found is None:
        place = str(folder) if folder else " or ".join(str(f) for f in FOLDERS[:2])
        raise DcgmUnavailable(
            f"no pydcgm.py in {place}: install DCGM's packages, or name the folder of its Python"
            " bindings in sources.dcgm.bindings"
        )
    if str(found) not in sys.path:
        # Last: its modules have everyday names and must not stand before others'.
        sys.path.append(str(found))
    names = ("pydcgm", "dcgm_agent", "dcgm_fields", "dcgm_structs")
    try:
        return Bindings(*(importlib.import_module(name) for name in names))
    except (Exception, SystemExit) as error:
        raise DcgmUnavailable(f"DCGM's bindings in {found} do not load: {error}") from error


class HostEngine:
    """A connection to a host engine, from ``__init__`` to ``close``. Not for several threads.

    ``address``: ``host[:port]``, the path of a Unix socket, or ``embedded`` for an engine within
    this process. Every method raises DcgmUnavailable when the connection is of no use any more.
    """

    def __init__(self, bindings: Bindings, address: str) -> None:
        self._bindings = bindings
        self._watches: list[_Watch] = []
        with self._connected():
            self._handle = bindings.pydcgm.DcgmHandle(
                opMode=bindings.structs.DCGM_OPERATION_MODE_AUTO, **_target(address)
            )
            self._system = self._handle.GetSystem()

    def entities(self) -> tuple[Entity, ...]:
        """Return the GPUs that DCGM supports, each followed by its GPU instances."""
        with self._connected():
            gpus = [self._gpu(gpu_id) for gpu_id in self._system.discovery.GetAllSupportedGpuIds()]
            instances = self._instances({gpu.gpu_id: gpu for gpu in gpus})
        return tuple(
            entity
            for gpu in gpus
            for entity in (gpu, *(one for one in instances if one.gpu_id == gpu.gpu_id))
        )

    def watch(self, entities: Sequence[Entity], names: Sequence[str], interval_s: float) -> None:
        """Let DCGM read these fields of the entities of one GPU every ``interval_s``.

        Fields that the GPU lacks are left out. Each GPU has a group: DCGM refuses a watch for a
        whole group if one of its GPUs cannot be profiled. Raises DcgmRefused.
        """
        name = f"warpwatch-{os.getpid()}-{next(_NAMES)}"
        with self._bindings.translated():
            group = self._system.GetEmptyGroup(name)
            for entity in entities:
                group.AddEntity(entity.kind, entity.id)
            fields = self._fields(group, names)
            if not fields:
                raise DcgmRefused("none of the profiling fields is supported")
            field_group = self._bindings.pydcgm.DcgmFieldGroup(self._handle, name, [*fields])
            kept_s = _KEPT_INTERVALS * interval_s
            group.samples.WatchFields(field_group, int(interval_s * 1e6), kept_s, 0)
        self._watches.append(_Watch(tuple(entities), group, field_group, fields))

    def latest(self) -> list[tuple[Entity, dict[str, FieldValue]]]:
        """Return the newest watched values by field name, without blank ones."""
        readings = []
        for watch in self._watches:
            values: Any = {}
            with contextlib.suppress(DcgmRefused), self._bindings.translated():
                values = watch.group.samples.GetLatest_v2(watch.field_group).values
            for entity in watch.entities:
                by_field = values.get(entity.kind, {}).get(entity.id, {})
                readings.append((entity, watch.readings(by_field)))
        return readings

    def is_lost(self, entity: Entity) -> bool:
        with self._connected():
            return self._system.discovery.GetGpuStatus(entity.gpu_id) in _GONE

    def pause(self) -> None:
        """Give up the hardware counters: for every client of this host engine. Or DcgmRefused."""
        with self._bindings.translated():
            self._system.profiling.Pause()

    def resume(self) -> None:
        """Take the hardware counters again; without effect where they are not given up."""
        with self._bindings.translated():
            self._system.profiling.Resume()

    def close(self) -> None:
        """Leave. The host engine drops what a client that is gone has watched."""
        with contextlib.suppress(DcgmRefused, DcgmUnavailable), self._bindings.translated():
            for watch in self._watches:
                watch.group.samples.UnwatchFields(watch.field_group)
                watch.field_group.Delete()
                watch.group.Delete()
        with contextlib.suppress(DcgmRefused, DcgmUnavailable), self._bindings.translated():
            self._handle.Shutdown()

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Turn refusals into DcgmUnavailable."""
        try:
            with self._bindings.translated():
                yield
        except DcgmRefused as refused:
            raise DcgmUnavailable(str(refused)) from refused

    def _gpu(self, gpu_id: int) -> Entity:
        found = self._system.discovery.GetGpuAttributes(gpu_id).identifiers
        info = {
            "driver_version": found.driverVersion,
            "pci_bus_id": found.pciBusId,
            "serial": found.serial,
            "vbios_version": found.vbios,
        }
        known = {name: text for name, text in info.items() if text and not text.startswith("<<<")}
        device = Device(found.uuid, gpu_id, found.deviceName, info=known)
        return Entity(self._bindings.fields.DCGM_FE_GPU, gpu_id, gpu_id, device)

    def _instances(self, gpus: Mapping[int, Entity]) -> list[Entity]:
        """Return the GPU instances, or none if the driver has no MIG."""
        hierarchy: Any = None
        with contextlib.suppress(DcgmRefused), self._bindings.translated():
            hierarchy = self._bindings.agent.dcgmGetGpuInstanceHierarchy(self._handle.handle)
        instances = []
        for one in hierarchy.entityList[: hierarchy.count] if hierarchy else ():
            gpu = gpus.get(one.parent.entityId)
            if one.entity.entityGroupId == self._bindings.fields.DCGM_FE_GPU_I and gpu is not None:
                parent = gpu.device
                gi = str(one.info.nvmlInstanceId)
                device = Device(parent.uuid, parent.index, parent.name, gi, info=parent.info)
                instances.append(
                    Entity(one.entity.entityGroupId, one.entity.entityId, gpu.gpu_id, device)
                )
        return instances

    def _fields(self, group: Any, names: Sequence[str]) -> dict[int, str]:
        """Return by number the named fields that this GPU can be profiled for."""
        listed = group.profiling.GetSupportedMetricGroups()
        supported = {
            field_id
            for one in listed.metricGroups[: listed.numMetricGroups]
            for field_id in one.fieldIds[: one.numFieldIds]
        }
        numbers = ((getattr(self._bindings.fields, name, -1), name) for name in names)
        return {number: name for number, name in numbers if number in supported}


@dataclass(frozen=True, slots=True)
class _Watch:
    """One GPU's groups in the host engine. ``fields``: names by number."""

    entities: tuple[Entity, ...]
    group: Any
    field_group: Any
    fields: Mapping[int, str]

    def readings(self, by_field: Mapping[int, Any]) -> dict[str, FieldValue]:
        newest = {self.fields[number]: series[-1] for number, series in by_field.items()}
        return {
            name: FieldValue(float(one.value), one.ts / 1e6)
            for name, one in newest.items()
            if not one.isBlank
        }


def _target(address: str) -> dict[str, str | None]:
    """Return DcgmHandle's arguments; neither address means an embedded engine."""
    if address == EMBEDDED:
        return {"ipAddress": None}
    if address.startswith("/"):
        return {"unixSocketPath": address}
    return {"ipAddress": address}
