"""What the driver answered: facts of the library, of each GPU, and of pairs of GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import pynvml

from warpwatch_devices.nvml.library import Meaning, meaning_of


class Modes(NamedTuple):
    """A setting that takes effect later: as it is, and as it will be."""

    current: int
    pending: int


class MemoryUse(NamedTuple):
    used_bytes: int
    total_bytes: int


class RemappedRows(NamedTuple):
    correctable: int
    uncorrectable: int
    pending: int
    failed: int


class NvLink(NamedTuple):
    """``active`` None: not known. ``remote_type``: NVML_NVLINK_DEVICE_TYPE_*."""

    active: bool | None
    remote_type: int | None
    remote_bus_id: str | None


class Fabric(NamedTuple):
    """``state``: NVML_GPU_FABRIC_STATE_*; ``status``: NVML return code of the registration.

    ``health``: bits of NVML_GPU_FABRIC_HEALTH_MASK_*, 0 from old drivers.
    """

    state: int
    status: int
    health: int = 0


class Pcie(NamedTuple):
    generation: int
    width: int


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one GPU; None: it did not answer, and ``codes`` has NVML's return code for it.

    ``waiting_for``: the question that was never answered. Power in mW, temperatures in °C.
    """

    index: int
    codes: dict[str, int] = {}
    waiting_for: str | None = None

    name: str | None = None
    uuid: str | None = None
    bus_id: str | None = None
    minor: int | None = None
    memory: MemoryUse | None = None
    busy_percent: int | None = None
    temperature: int | None = None
    temperature_margin: int | None = None
    slowdown_temperature: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    default_power_limit_mw: int | None = None
    mig_mode: Modes | None = None
    mig_instances: tuple[str, ...] | None = None
    persistence_mode: int | None = None
    ecc_mode: Modes | None = None
    compute_mode: int | None = None
    remapped_rows: RemappedRows | None = None
    retired_pages_pending: int | None = None
    uncorrected_volatile: int | None = None
    uncorrected_aggregate: int | None = None
    recovery_action: int | None = None
    clock_event_reasons: int | None = None
    pcie: Pcie | None = None
    max_pcie: Pcie | None = None
    processes: tuple[int, ...] | None = None
    nvlinks: tuple[NvLink, ...] | None = None
    fabric: Fabric | None = None
    gpm: bool | None = None
    gpm_sample: bool | None = None

    @property
    def up(self) -> bool:
        return self.waiting_for is None and self.down_code is None

    @property
    def down_code(self) -> int | None:
        """The return code that says why the whole GPU cannot be read; None: it can."""
        for code in self.codes.values():
            if meaning_of(code) in (Meaning.LOST, Meaning.RESET_REQUIRED, Meaning.LIBRARY):
                return code
        if "handle" in self.codes:
            return self.codes["handle"]
        if self.memory is None and self.temperature is None:
            refusals = [
                code for code in self.codes.values() if meaning_of(code) is not Meaning.UNSUPPORTED
            ]
            return refusals[0] if refusals else None
        return None

    def unsupported(self, question: str) -> bool:
        code = self.codes.get(question)
        return code is not None and meaning_of(code) is Meaning.UNSUPPORTED


@dataclass(frozen=True)
class Survey:
    """All that the driver answered.

    code: NVML's return code of the initialisation, None while it is out. error: it in words.
    count: how many GPUs the driver says there are; count_code: why it does not say.
    crashed_by: the signal that ended the questioning. patience_s: how long an answer was waited
    for. ancestors, peer_access: by pairs of indices, the lower one first (NVML_TOPOLOGY_*,
    NVML_P2P_STATUS_*).
    """

    patience_s: float
    asked: bool = True
    code: int | None = None
    error: str = ""
    crashed_by: int | None = None
    library: str | None = None
    driver_version: str | None = None
    nvml_version: str | None = None
    cuda_version: int | None = None
    count: int | None = None
    count_code: int | None = None
    devices: tuple[DeviceFacts, ...] = ()
    ancestors: Mapping[tuple[int, int], int] = field(default_factory=dict)
    peer_access: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @property
    def started(self) -> bool:
        return self.code == int(pynvml.NVML_SUCCESS)

    @property
    def up(self) -> tuple[DeviceFacts, ...]:
        return tuple(device for device in self.devices if device.up)
