"""Provides findings, which several GPUs may share, and the inputs of the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.doctor.machine import Machine
from warpwatch_devices.nvml.survey import Survey

# The values of Check.ok.
OK, NOTE, BAD = True, None, False


@dataclass(frozen=True, slots=True)
class Check:
    """A finding. ``ok`` None: no fault, but worth knowing. ``advice``: a command or setting."""

    name: str
    ok: bool | None
    detail: str
    advice: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class CheckInputs:
    """The subjects of the checks. ``here``: this machine is examined, not a daemon elsewhere."""

    config: Config
    api: ApiClient
    machine: Machine
    survey: Survey
    here: bool = True


Group = Callable[[CheckInputs], Iterator[Check]]


def gpu_set(indices: Iterable[int]) -> str:
    """Return ``0,1,2,5`` as ``GPU 0-2,5``."""
    ordered = sorted(indices)
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b != a + 1), ordered[-1]]
    runs = zip(starts, ends, strict=True)
    return "GPU " + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def listed(names: list[str], limit: int) -> str:
    """Return the first ``limit`` names and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def merged(found: Iterable[tuple[int, Check | None]]) -> Iterator[Check]:
    """Yield each finding once with all its GPUs, faults first; ``{gpus}`` in advice is their list.

    A GPU without a finding has None.
    """
    same: dict[Check, list[int]] = {}
    for index, check in found:
        if check is not None:
            same.setdefault(check, []).append(index)
    for check in sorted(same, key=lambda check: (check.ok is not BAD, check.ok is OK)):
        numbers = ",".join(str(index) for index in sorted(same[check]))
        yield replace(
            check,
            detail=f"{gpu_set(same[check])}: {check.detail}",
            advice=check.advice.replace("{gpus}", numbers),
        )
