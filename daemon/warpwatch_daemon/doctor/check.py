"""One finding of `warpwatch doctor`, and how findings of several GPUs become one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.doctor.facts import Survey
from warpwatch_daemon.doctor.machine import Machine


@dataclass(frozen=True, slots=True)
class Check:
    """``ok`` None: no fault, but worth knowing. ``advice``: the command or setting that helps."""

    name: str
    ok: bool | None
    detail: str
    advice: str = ""
    group: str = ""


def gpu_set(indices: Iterable[int]) -> str:
    """``0,1,2,5`` as ``GPU 0-2,5``."""
    ordered = sorted(indices)
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b != a + 1), ordered[-1]]
    runs = zip(starts, ends, strict=True)
    return "GPU " + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def listed(names: list[str], most: int) -> str:
    """The first ``most`` of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def merged(found: Iterable[tuple[int, Check]]) -> Iterator[Check]:
    """What several GPUs have in common is said once; ``{gpus}`` in the advice names them.

    Faults come first, so that the first line of a subject is its worst.
    """
    same: dict[Check, list[int]] = {}
    for index, check in found:
        same.setdefault(check, []).append(index)
    for check in sorted(same, key=lambda check: (check.ok is not False, check.ok is True)):
        indices = same[check]
        listed = ",".join(str(index) for index in sorted(indices))
        yield replace(
            check,
            detail=f"{gpu_set(indices)}: {check.detail}",
            advice=check.advice.replace("{gpus}", listed),
        )


@dataclass(frozen=True, slots=True)
class CheckInputs:
    """here: whether this machine is asked for, not a daemon elsewhere."""

    config: Config
    api: ApiClient
    machine: Machine
    survey: Survey
    here: bool = True


Group = Callable[[CheckInputs], Iterator[Check]]
