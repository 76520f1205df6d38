"""Readings by the survey's child of a driver in each state."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cases import cases
from tests.devices.fakenvml.driver import FakeDriver
from tests.waiting import DEADLINE_S
from warpwatch_devices.nvml.survey import survey


@pytest.mark.parametrize(("name", "state"), cases(__file__).items())
def test_all_that_a_driver_says_is_in_the_survey(
    fake_driver: FakeDriver, monkeypatch: Any, golden_case: Any, name: str, state: dict[str, Any]
) -> None:
    still = ["set", None, {"monotonic_s": 100.0, "wall_s": 1e9}]
    for method, *arguments in [still, *state["driver"]]:
        settings = arguments.pop() if isinstance(arguments[-1], dict) else {}
        getattr(fake_driver, method)(*arguments, **settings)
    for variable, value in fake_driver.environment.items():
        monkeypatch.setenv(variable, value)
    found = survey(state.get("patience", DEADLINE_S))
    whole = replace(found, gpus=(), pairs=(), library=Path(found.library or "").name)
    lines = [str(whole), *sorted(map(str, found.pairs))]
    for gpu in found.gpus:
        info = {k: text for k, text in gpu.info.items() if k != "driver_load"}
        lines.append(f"{'up' if gpu.up else 'down'} {gpu.address} {gpu.links}")
        lines.append(str(replace(gpu, values={}, info=info)))
        lines += [f"{key} {value:.6g}" for key, value in sorted(gpu.values.items()) if value]
    golden_case("".join(f"{line}\n" for line in lines), name)
