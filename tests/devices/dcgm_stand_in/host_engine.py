"""A stand-in for DCGM's Python bindings and its host engine, for tests without DCGM.

Written from the public API (NVIDIA/DCGM testing/python3): only the names that dcgm_bindings.py
uses, with their signatures and types. The real bindings have not been run with Warpwatch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import c_void_p
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

from tests.devices.dcgm_stand_in import dcgm_structs as structs
from tests.devices.dcgm_stand_in.dcgm_fields import DCGM_FE_GPU, DCGM_FE_GPU_I
from tests.waiting import DEADLINE_S


class DCGMError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        texts = {
            -21: "The connection to the host engine is not valid any longer",
            -33: "This request is serviced by a module that is not loaded",
            -36: "Profiling is not supported for this group of GPUs or GPU",
        }
        return texts.get(self.value, f"DCGM Error with code {self.value}")


@dataclass
class Engine:
    """The state of the host engine.

    calls: the calls that changed its state. values: by kind and number of the entity, by field.
    instances: None if the driver does not support MIG. started: another number after each start.
    answers: while it is not set, no call returns. age_s: the age of the values.
    """

    wall: Callable[[], float] = float
    gpus: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    instances: list[dict[str, int]] | None = None
    calls: list[str] = field(default_factory=list)
    up: bool = True
    error: Exception | None = None
    started: int = 0
    paused: bool = False
    can_pause: bool = True
    blank_while_paused: bool = True
    age_s: float = 0.0
    answers: threading.Event = field(default_factory=threading.Event)

    def change(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self, name, value)


# The one of the test that runs.
ENGINE = Engine()


def call(started: int) -> Engine:
    """Do what every call does, unless the engine hangs, is down or was started again."""
    ENGINE.answers.wait(DEADLINE_S)
    if ENGINE.error is not None:
        raise ENGINE.error
    if not ENGINE.up or ENGINE.started != started:
        raise DCGMError(structs.DCGM_ST_CONNECTION_NOT_VALID)
    return ENGINE


class DcgmHandle:
    def __init__(
        self,
        handle: Any = None,
        ipAddress: str | None = None,
        opMode: int = structs.DCGM_OPERATION_MODE_AUTO,
        persistAfterDisconnect: bool = False,
        unixSocketPath: str | None = None,
        timeoutMs: int = 0,
    ) -> None:
        self.started = ENGINE.started
        call(self.started)
        assert opMode == structs.DCGM_OPERATION_MODE_AUTO and not persistAfterDisconnect
        ENGINE.calls.append(f"connect {ipAddress} {unixSocketPath}")
        self.handle: c_void_p | None = c_void_p(1)

    def GetSystem(self) -> DcgmSystem:
        return DcgmSystem(self)

    def Shutdown(self) -> None:
        if self.handle is not None:
            self.handle = None
            ENGINE.calls.append(" ".join(("disconnect", *DcgmFieldGroup.names)))
            DcgmFieldGroup.names.clear()


class OfHandle:
    def __init__(self, dcgmHandle: DcgmHandle, dcgmGroup: DcgmGroup | None = None) -> None:
        self._handle = dcgmHandle
        self.members: list[tuple[int, int]] = dcgmGroup.members if dcgmGroup else []

    def _call(self) -> Engine:
        return call(self._handle.started)

    def _gpu(self, gpuId: int) -> dict[str, Any]:
        return next(gpu for gpu in self._call().gpus if gpu["id"] == gpuId)


class DcgmSystem(OfHandle):
    def __init__(self, dcgmHandle: DcgmHandle) -> None:
        super().__init__(dcgmHandle)
        self.discovery = DcgmSystemDiscovery(dcgmHandle)
        self.profiling = DcgmSystemProfiling(dcgmHandle)

    def GetEmptyGroup(self, groupName: str) -> DcgmGroup:
        return DcgmGroup(self._handle, groupName)


class DcgmSystemDiscovery(OfHandle):
    def GetAllSupportedGpuIds(self) -> list[int]:
        return [gpu["id"] for gpu in self._call().gpus]

    def GetGpuAttributes(self, gpuId: int) -> Any:
        gpu = self._gpu(gpuId)
        identifiers = SimpleNamespace(
            uuid=gpu["uuid"],
            deviceName=gpu.get("name", "NVIDIA A100-SXM4-80GB"),
            pciBusId=f"00000000:0{gpuId}:00.0",
            serial="<<<NOT_SUPPORTED>>>",
            vbios="92.00.36.00.01",
            driverVersion="550.54.15",
        )
        return SimpleNamespace(identifiers=identifiers)

    def GetGpuStatus(self, gpuId: int) -> int:
        gpu = self._gpu(gpuId)
        return int(gpu.get("status", 1))


class DcgmSystemProfiling(OfHandle):
    def Pause(self) -> int:
        if not self._call().can_pause:
            raise DCGMError(structs.DCGM_ST_MODULE_NOT_LOADED)
        ENGINE.paused = True
        ENGINE.calls.append("pause")
        return 0

    def Resume(self) -> int:
        if not self._call().can_pause:
            raise DCGMError(structs.DCGM_ST_MODULE_NOT_LOADED)
        ENGINE.paused = False
        ENGINE.calls.append("resume")
        return 0


class DcgmGroup(OfHandle):
    def __init__(self, dcgmHandle: DcgmHandle, groupName: str) -> None:
        super().__init__(dcgmHandle)
        self._name = groupName
        DcgmFieldGroup.names.add(f"group {groupName}")
        self.samples: DcgmGroupSamples | None = DcgmGroupSamples(dcgmHandle, self)
        self.profiling: DcgmGroupProfiling | None = DcgmGroupProfiling(dcgmHandle, self)

    def AddEntity(self, entityGroupId: int, entityId: int) -> None:
        for gpu in self._call().gpus:
            if entityGroupId == DCGM_FE_GPU and gpu["id"] == entityId and gpu.get("status") == 4:
                raise DCGMError(structs.DCGM_ST_GPU_IS_LOST)
        self.members.append((entityGroupId, entityId))

    def Delete(self) -> None:
        self._call()
        DcgmFieldGroup.names.discard(f"group {self._name}")
        self.samples = self.profiling = None


class DcgmGroupProfiling(OfHandle):
    def GetSupportedMetricGroups(self) -> Any:
        gpu = self._gpu(next(entity for kind, entity in self.members if kind == DCGM_FE_GPU))
        if not gpu["profiling"]:
            raise DCGMError(structs.DCGM_ST_PROFILING_NOT_SUPPORTED)
        # As in the C structures, arrays are longer than what is valid of them.
        half = len(gpu["profiling"]) // 2
        groups = [
            SimpleNamespace(numFieldIds=len(part), fieldIds=[*part, *[1005] * 8])
            for part in (gpu["profiling"][:half], gpu["profiling"][half:])
        ]
        return SimpleNamespace(numMetricGroups=2, metricGroups=[*groups, None, None])


class DcgmFieldGroup:
    names: ClassVar[set[str]] = set()

    def __init__(self, dcgmHandle: DcgmHandle, name: str = "", fieldIds: Any = None) -> None:
        call(dcgmHandle.started)
        if name in self.names:
            raise DCGMError(structs.DCGM_ST_DUPLICATE_KEY)
        self.names.add(name)
        self.name = name
        self.fieldIds = list(fieldIds)

    def Delete(self) -> None:
        self.names.discard(self.name)


class DcgmGroupSamples(OfHandle):
    def WatchFields(
        self, fieldGroup: DcgmFieldGroup, updateFreq: int, maxKeepAge: float, maxKeepSamples: int
    ) -> None:
        self._call()
        fields = ",".join(map(str, sorted(fieldGroup.fieldIds)))
        watched = f"{self.members} {fields} {updateFreq} {maxKeepAge} {maxKeepSamples}"
        ENGINE.calls.append(f"watch {watched}")

    def UnwatchFields(self, fieldGroup: DcgmFieldGroup) -> None:
        self._call()
        ENGINE.calls.append(f"unwatch {self.members}")

    def GetLatest_v2(self, fieldGroup: DcgmFieldGroup) -> Any:
        now = self._call()
        # Values become blank at the next update after the pause began.
        paused = now.paused and now.blank_while_paused
        values: dict[int, dict[int, dict[int, list[Any]]]] = {}
        for kind, entity in self.members:
            reported = now.values.get(f"{kind}/{entity}", {})
            values.setdefault(kind, {})[entity] = {
                # The newest comes last.
                field: [
                    _field_value(0.0, now),
                    _field_value(None if paused else reported.get(field), now),
                ]
                for field in fieldGroup.fieldIds
            }
        return SimpleNamespace(values=values)


def _field_value(value: float | None, now: Engine) -> Any:
    """dcgm_field_helpers.DcgmFieldValue: ``ts`` in microseconds."""
    ts = int((now.wall() - now.age_s) * 1e6)
    return SimpleNamespace(value=value, isBlank=value is None, ts=ts)


def dcgmGetGpuInstanceHierarchy(dcgm_handle: Any) -> Any:
    if ENGINE.instances is None:
        raise DCGMError(structs.DCGM_ST_NOT_SUPPORTED)
    pairs = [
        SimpleNamespace(
            entity=SimpleNamespace(entityGroupId=DCGM_FE_GPU_I, entityId=one["id"]),
            parent=SimpleNamespace(entityGroupId=DCGM_FE_GPU, entityId=one["gpu"]),
            info=SimpleNamespace(nvmlInstanceId=one["gi"]),
        )
        for one in ENGINE.instances
    ]
    # A compute instance, whose parent is the instance, and the unused rest of the array.
    compute = SimpleNamespace(
        entity=SimpleNamespace(entityGroupId=5, entityId=0),
        parent=SimpleNamespace(entityGroupId=DCGM_FE_GPU_I, entityId=0),
        info=SimpleNamespace(nvmlInstanceId=0),
    )
    return SimpleNamespace(count=len(pairs) + 1, entityList=[*pairs, compute, None, None])
