"""What a check is given, and what it writes: figures in parts, and lines that judge them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CannotCheck(Exception):
    """There is nothing to check here; the one line says why."""


@dataclass(frozen=True, slots=True)
class RunSetting:
    """Where and how it is checked.

    out: the folder of the results. fake: the driver is the fake one of the tests.
    quick: as short as it can be, to try the checks themselves.
    device: torch's device: cuda, or cpu to try the programs without a GPU.
    """

    out: str
    fake: bool = False
    quick: bool = False
    device: str = "cuda"

    def need_torch(self) -> None:
        """Raises CannotCheck where nothing can be computed on the device."""
        if self.fake and self.device == "cuda":
            raise CannotCheck("the fake driver has no CUDA")
        if importlib.util.find_spec("torch") is None:
            raise CannotCheck("torch is not installed")


class Report:
    """Written to a file as JSON lines, so that what was measured stays when the check is killed."""

    def __init__(self, setting: RunSetting, file: Path) -> None:
        self.setting = setting
        self._file = file

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[dict[str, Any]]:
        """What is put into the figures is kept; an exception costs only this part."""
        figures: dict[str, Any] = {}
        self._write(begun=name)
        try:
            yield figures
        except CannotCheck as reason:
            figures["skipped"] = str(reason)
        except Exception as error:
            traceback.print_exc()
            figures["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.expect(False, f"{name}: {figures['error']}")
        self._write(part=name, figures=figures)

    def fact(self, text: str) -> None:
        """A line for the reader to judge."""
        self._write(ok=None, text=text)

    def expect(self, ok: bool, text: str, *, timed: bool = False) -> None:
        """``timed``: a time or a cost, which a quick run is too short to judge."""
        self._write(ok=None if timed and self.setting.quick else ok, text=text)

    def _write(self, **entry: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(entry) + "\n")
