"""For devices and drivers that lack a field: what the field would have said, by a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pynvml

from warpwatch_devices.nvml.batch import FieldBatch
from warpwatch_devices.nvml.readers import Read, key_of, value_of
from warpwatch_devices.nvml.tiers import RARE_S, SLOWER_S, Reader
from warpwatch_telemetry.metric import Values


def field_substitutes(energy_samples: Read) -> Iterable[Reader]:
    """Each is dropped as soon as the device has answered its field."""

    def instead(number: int, name: str, read: Read, period_s: float = 0.0) -> Reader:
        return Reader(name, read, period_s, instead_of=number)

    yield instead(pynvml.NVML_FI_DEV_POWER_AVERAGE, "power", _power)
    yield instead(pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, "power_samples", energy_samples)
    current = pynvml.NVML_FI_DEV_POWER_CURRENT_LIMIT
    yield instead(current, "power_limit", _power_limit, SLOWER_S)
    default = pynvml.NVML_FI_DEV_POWER_DEFAULT_LIMIT
    yield instead(default, "power_limit", _power_limit_default, RARE_S)
    highest = pynvml.NVML_FI_DEV_POWER_MAX_LIMIT
    yield instead(highest, "power_limit", _power_limit_range, RARE_S)
    state = pynvml.NVML_FI_DEV_NVLINK_GET_STATE
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        yield instead(state, "nvlink_state", _nvlink_state(link), RARE_S)


def supports(batches: Iterable[FieldBatch]) -> Callable[[int], bool | None]:
    """Whether the device supports a field, as far as its batches have found out."""
    known = tuple(batches)

    def ask(number: int) -> bool | None:
        if any(number in batch.answered for batch in known):
            return True
        return False if any(number in batch.unsupported for batch in known) else None

    return ask


def _nvlink_state(link: int) -> Read:
    key = key_of("nvlink_link_up", str(link))
    return lambda handle: {key: pynvml.nvmlDeviceGetNvLinkState(handle, link)}


def _power_limit_range(handle: Any) -> Values:
    lowest_mw, highest_mw = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    return {
        key_of("power_limit_min_watts"): lowest_mw / 1000,
        key_of("power_limit_max_watts"): highest_mw / 1000,
    }


_power = value_of(key_of("power_watts"), pynvml.nvmlDeviceGetPowerUsage, divisor=1000)
_power_limit = value_of(
    key_of("power_limit_watts"), pynvml.nvmlDeviceGetEnforcedPowerLimit, divisor=1000
)
_power_limit_default = value_of(
    key_of("power_limit_default_watts"),
    pynvml.nvmlDeviceGetPowerManagementDefaultLimit,
    divisor=1000,
)
