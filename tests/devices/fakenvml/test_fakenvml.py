"""The fake driver as pynvml sees it: the rest is proven by what the readers make of it."""

from __future__ import annotations

import pynvml
import pytest

from tests.devices.nvml_by_hand import HandNvml, uuid


def test_what_the_control_file_says_holds_from_the_next_call_on(nvml: HandNvml) -> None:
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 8
    third = pynvml.nvmlDeviceGetHandleByIndex(3)
    assert pynvml.nvmlDeviceGetUUID(third) == uuid(3)
    energy_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(third)
    nvml.advance(2.0)
    # 370 W at half load.
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(third) - energy_mj == 740_000
    nvml.driver.set(3, lost=1)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetPowerUsage(third)
    nvml.driver.set(3, lost=None, power_w=123, profile="t4")
    assert pynvml.nvmlDeviceGetPowerUsage(third) == 123_000
    assert pynvml.nvmlDeviceGetName(third) == "Tesla T4"
    assert nvml.calls("nvmlDeviceGetPowerUsage", 3) == 2
    with pytest.raises(ValueError, match="lots is no setting"):
        nvml.driver.set(3, lots=True)
