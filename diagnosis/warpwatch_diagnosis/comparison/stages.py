"""The stages of a pipeline side by side: what each computes in a step, and waits for the others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from warpwatch_diagnosis.measures.intervals import difference, total, union
from warpwatch_diagnosis.measures.measures import Measures

# What hands activations and gradients from stage to stage: torch.distributed's and NCCL's names.
_BETWEEN_STAGES = re.compile(r"send|recv", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Stage:
    """``busiest``: of its ranks; ``busy_us``: the median of its ranks, of one step."""

    number: int
    busiest: Measures
    busy_us: float


def stages(capture: Sequence[Measures]) -> list[Stage]:
    """In order; nothing unless each stage of the pipeline has a rank in the capture."""
    members: dict[int, list[Measures]] = defaultdict(list)
    sizes = {m.stage[1] if m.stage else 1 for m in capture}
    for measures in capture:
        members[measures.stage[0] if measures.stage else 0].append(measures)
    if len(sizes) != 1 or len(members) < 2 or {*members} != {*range(*sizes)}:
        return []
    return [
        Stage(number, max(some, key=_busy_us), median(map(_busy_us, some)))
        for number, some in sorted(members.items())
    ]


def _busy_us(measures: Measures) -> float:
    """What the rank computes in a step; on the CPU all that is no waiting for data or others."""
    if measures.gpu is not None:
        return total(measures.gpu.compute) / measures.step_count
    waiting = union(measures.loading + (measures.cpu.waiting if measures.cpu else []))
    return (measures.window_us - total(waiting)) / measures.step_count


def waits_for_stages_us(measures: Measures) -> float:
    """In the window, for what other stages hand over, while nothing is computed."""
    if measures.gpu is not None:
        handed = [
            (max(c.begin_us, measures.window[0]), min(c.end_us, measures.window[1]))
            for c in measures.gpu.collectives
            if _BETWEEN_STAGES.search(c.name) and c.begin_us < measures.window[1]
        ]
        return total(difference(union(handed), measures.gpu.compute))
    if measures.cpu is None or not any(map(_BETWEEN_STAGES.search, measures.cpu.collectives)):
        return 0.0
    return total(measures.cpu.waiting)
