"""What a check is: parts that are measured one after the other, each with what it means."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CannotCheck(Exception):
    """A part has no meaning here; the one line says why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how it is checked.

    out: the folder of the results. fake: the driver is the fake one of the tests.
    quick: as short as it can be, to try the checks themselves out.
    device: torch's device: cuda, or cpu to try the programs out without a GPU.
    """

    out: Path
    fake: bool = False
    quick: bool = False
    device: str = "cuda"

    def seconds(self, full: float, quick: float) -> float:
        return quick if self.quick else full

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the summary. ``ok`` None: a fact, to be judged by who reads it."""

    ok: bool | None
    text: str


def no_findings(measured: Any) -> Iterable[Finding]:
    return ()


@dataclass(frozen=True, slots=True)
class Part:
    """``measure`` returns what JSON can hold. What it raises costs only this part."""

    name: str
    measure: Callable[[], Any]
    findings: Callable[[Any], Iterable[Finding]] = no_findings


Parts = Callable[[Setting], Iterator[Part]]


def need_torch(setting: Setting) -> None:
    """Raises CannotCheck where nothing can be computed on the device."""
    if setting.fake and setting.device == "cuda":
        raise CannotCheck("the fake driver has no CUDA")
    if importlib.util.find_spec("torch") is None:
        raise CannotCheck("torch is not installed")


def need_nvidia_smi() -> str:
    """Its path. Raises CannotCheck."""
    path = shutil.which("nvidia-smi")
    if path is None:
        raise CannotCheck("there is no nvidia-smi")
    return path


def need_root() -> None:
    """Raises CannotCheck."""
    if os.geteuid() != 0:
        raise CannotCheck(f"not root (uid {os.geteuid()}): there are no rights to give up")
