"""Results of functions and small classes of the devices, as a golden file of expressions."""

import ctypes
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests import expressions
from tests.answers import answered, limits, raised
from tests.conftest import Cases
from tests.locks import held
from warpwatch_devices import processes
from warpwatch_devices.attribution import source as attribution
from warpwatch_devices.dcgm import source as dcgm_source
from warpwatch_devices.nvml import fields
from warpwatch_devices.nvml import processes as nvml_processes

MODULES = {
    "": "operator pynvml struct sys",
    "tests": "manual_clock",
    "tests.devices": "recording",
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


def reads(batch: fields.FieldBatch, *answers: dict[int, tuple[int, int, int]]) -> list[object]:
    """Return readings of a batch and what it learns; each field has (type, return code, value).

    Field 0 stands for a call with several fields.
    """

    def call(
        now: dict[int, tuple[int, int, int]], handle: object, number: int, pointer: object
    ) -> int:
        at = ctypes.cast(pointer, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
        size = fields._ANSWER.size
        for place in range(at, at + number * size, size):
            memory = (ctypes.c_char * size).from_address(place)
            own, scope, *_ = fields._ANSWER.unpack(memory)
            kind, code, value = now.get(own, (3, 3, 0))
            fields._ANSWER.pack_into(
                memory, 0, own, scope, 1_000_000 * len(found), 0, kind, code, value
            )
        return now[own if number == 1 and 0 in now else 0][1] if 0 in now else 0

    found: list[object] = []
    for now in answers:
        values = answered(
            batch.read, None, of=fields, function=lambda _, now=now: partial(call, now)
        )
        known = sorted(batch.answered), sorted(batch.unsupported)
        found.append((values, *known, batch.reader.calls, batch.reader.refusals))
    return found


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
            folder = root / name if text is None else (root / name).parent
            folder.mkdir(parents=True, exist_ok=True)
            if text is not None:
                (root / name).write_text(text)
        return root

    calls = (raised, answered, limits, held, failing, nvml, reads, tree)
    more: dict[str, object] = {call.__name__: call for call in calls}
    more |= {"attribution": attribution, "dcgm_source": dcgm_source}
    more["nvml_processes"] = nvml_processes
    expressions.check(cases, "devices/functions.txt", MODULES, more)
