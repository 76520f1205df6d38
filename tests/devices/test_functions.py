"""Results of functions and small classes of the devices, as a golden file of expressions."""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests import expressions
from tests.answers import answered, raised
from tests.conftest import Cases
from tests.devices.hand_loops import HandLoops
from tests.devices.recording import RecordingSink
from tests.locks import held
from tests.manual_clock import ManualClock
from warpwatch_devices import processes
from warpwatch_devices.attribution import source as attribution
from warpwatch_devices.nvml import processes as nvml_processes

MODULES = {
    "warpwatch_devices": "config host memory_groups processes processor_waits simulated xids",
    "warpwatch_devices.attribution": "control_groups device_ids folders kubelet",
    "warpwatch_devices.dcgm": "bindings exporter_source values",
    "warpwatch_devices.nvml": "counters device events fields gpm library mig readers source survey",
    "warpwatch_telemetry": "samples",
}


def failing(code: int) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise pynvml.NVMLError(code)

    return call


def nvml(work: Callable[..., object], *arguments: object, **answers: Any) -> object:
    """Return the result while functions of NVML have these answers."""
    named = {f"nvml{name}": answer for name, answer in answers.items()}
    return answered(work, *arguments, of=pynvml, **named)


def test_each_expression_has_its_golden_value(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_TICK_S", 0.01)
    monkeypatch.setattr(processes, "_PAGE_BYTES", 4096)
    numbers = itertools.count()

    def tree(files: dict[str, str | None]) -> Path:
        """Make a folder with these files; a name without a text is a folder."""
        root = Path(f"tree{next(numbers)}").absolute()
        for name, text in files.items():
            (root / name if text is None else (root / name).parent).mkdir(
                parents=True, exist_ok=True
            )
            if text is not None:
                (root / name).write_text(text)
        return root

    own = (
        raised,
        failing,
        answered,
        nvml,
        tree,
        partial,
        held,
        ManualClock,
        RecordingSink,
        HandLoops,
    )
    more = {one.__name__: one for one in own} | {
        "pynvml": pynvml,
        "sys": sys,
        "attribution": attribution,
    }
    more["nvml_processes"] = nvml_processes
    expressions.check(cases, "devices/functions.txt", MODULES, more)
