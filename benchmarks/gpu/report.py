"""Gives a check its setting, and writes its figures and judged lines."""

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
    """Raised with one line: why there is nothing to check here."""


@dataclass(frozen=True, slots=True)
class RunSetting:
    """Where and how a check runs.

    ``out`` is the folder of the results. With ``fake`` the driver is the fake one of the tests.
    ``quick`` makes windows short, to try the checks themselves. ``device`` is torch's: cuda, or cpu
    to try the programs without a GPU.
    """

    out: str
    fake: bool = False
    quick: bool = False
    device: str = "cuda"

    def need_torch(self) -> None:
        """Raise CannotCheck if nothing can be computed on the device."""
        if self.fake and self.device == "cuda":
            raise CannotCheck("the fake driver has no CUDA")
        if importlib.util.find_spec("torch") is None:
            raise CannotCheck("torch is not installed")


class Report:
    """The output of a check: JSON lines in a file, which stay if the check is killed."""

    def __init__(self, setting: RunSetting, file: Path) -> None:
        self.setting = setting
        self._file = file

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[dict[str, Any]]:
        """Keep the figures that the block adds; an exception ends only this part."""
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
        """Write a line without a judgement."""
        self._write(ok=None, text=text)

    def expect(self, ok: bool, text: str, *, timed: bool = False) -> None:
        """Write a judged line; a quick run does not judge times and costs (``timed``)."""
        self._write(ok=None if timed and self.setting.quick else ok, text=text)

    def _write(self, **entry: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(entry) + "\n")
