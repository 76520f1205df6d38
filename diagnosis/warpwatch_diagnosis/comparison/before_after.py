"""What two traces of the same work differ in: by phase of the step and by kernel.

Before and after a change of the same job, or a slow rank and a typical one. The phases of a step
are disjoint and add up to it, so their changes add up to the change of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from warpwatch_diagnosis.measures.clocks import MAX_SPREAD, slowdown
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.idle import CAUSES
from warpwatch_diagnosis.measures.intervals import difference, total
from warpwatch_diagnosis.measures.kernels import TOP, KernelClass, KernelTime
from warpwatch_diagnosis.measures.measures import Measures

# As many kernels a step as before, within this, is the same work.
SAME_COUNT = 0.02
# A step that takes this much longer than the baseline's is worth a doubt (TraceML's warning level).
MIN_STEP_RATIO = 1.10
# Of the step, below which a change is not told.
MIN_TOLD_SHARE = 0.01
_SHOWN = 10

Change = Literal["new", "gone", "slower", "faster", "more", "fewer", "same"]


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """One phase, in ms per step: a part of GPU time, or an idle cause as ``idle: <cause>``."""

    phase: str
    before_ms: float
    now_ms: float

    @property
    def change_ms(self) -> float:
        return self.now_ms - self.before_ms

    @property
    def title(self) -> str:
        """As a person reads it: ``idle time (data loading)``."""
        words = self.phase.replace("_", " ")
        cause = words.removeprefix("idle: ")
        return words if cause == words else f"idle time ({cause})"


@dataclass(frozen=True, slots=True)
class KernelChange:
    """All kernels of one name, per step. ratio: of the medians, None unless they are on both
    sides."""

    name: str
    kernel_class: KernelClass
    before_ms: float
    now_ms: float
    before_count: float
    now_count: float
    ratio: float | None

    @property
    def change_ms(self) -> float:
        return self.now_ms - self.before_ms

    @property
    def change(self) -> Change:
        if not self.before_count or not self.now_count:
            return "gone" if self.before_count else "new"
        if abs(self.now_count / self.before_count - 1) > SAME_COUNT:
            return "more" if self.now_count > self.before_count else "fewer"
        if self.ratio is None or abs(self.ratio - 1) <= MAX_SPREAD:
            return "same"
        return "slower" if self.ratio > 1 else "faster"


@dataclass(frozen=True, slots=True)
class Comparison:
    """phases: largest change first, in order of size; kernels: likewise, at most ten.

    slowdown: the factor by which all kernels are slower alike, as with lower clocks; else None.
    """

    label: str
    rank: int | None
    before_step_ms: float
    now_step_ms: float
    phases: tuple[PhaseChange, ...]
    kernels: tuple[KernelChange, ...]
    slowdown: float | None

    @property
    def step_ratio(self) -> float:
        return self.now_step_ms / self.before_step_ms if self.before_step_ms else 1.0

    @property
    def sentences(self) -> tuple[str, ...]:
        """The answer for a person: the step, the phases, then the kernels that changed."""
        told_ms = MIN_TOLD_SHARE * max(self.before_step_ms, self.now_step_ms)
        found = [
            f"{self.label}: a step takes {self.now_step_ms:,.1f} ms, "
            f"in the baseline {self.before_step_ms:,.1f} ms"
        ]
        found += [
            f"{p.title}: {p.before_ms:,.1f} ms -> {p.now_ms:,.1f} ms ({p.change_ms:+,.1f} ms)"
            for p in self.phases
            if abs(p.change_ms) >= told_ms
        ]
        if self.slowdown is not None:
            percentage = 100 * (self.slowdown - 1)
            found.append(
                f"the same kernels are all {percentage:.0f} % slower, as with lower clocks"
            )
            return tuple(found)
        return (*found, *(_sentence(k) for k in self.kernels if abs(k.change_ms) >= told_ms))

    def to_json(self) -> dict[str, Any]:
        """One entry of ``comparison``."""
        return {
            "rank": self.rank,
            "before_step_ms": round(self.before_step_ms, 3),
            "now_step_ms": round(self.now_step_ms, 3),
            "slowdown_ratio": None if self.slowdown is None else round(self.slowdown, 4),
            "phases": [
                {
                    "phase": p.phase,
                    "before_ms": round(p.before_ms, 3),
                    "now_ms": round(p.now_ms, 3),
                    "change_ms": round(p.change_ms, 3),
                }
                for p in self.phases
            ],
            "kernels": [_kernel_json(k) for k in self.kernels],
            "sentences": list(self.sentences),
        }


def _sentence(kernel: KernelChange) -> str:
    name = kernel.name if len(kernel.name) <= 60 else kernel.name[:59] + "…"
    text = (
        f"kernel {name} is {kernel.change}: {kernel.before_ms:,.2f} ms -> {kernel.now_ms:,.2f} ms"
    )
    if kernel.change in ("more", "fewer"):
        text += f", {kernel.before_count:,.0f} -> {kernel.now_count:,.0f} times"
    return text + " a step"


def _kernel_json(kernel: KernelChange) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "kernel_class": kernel.kernel_class,
        "change": kernel.change,
        "before_ms": round(kernel.before_ms, 3),
        "now_ms": round(kernel.now_ms, 3),
        "change_ms": round(kernel.change_ms, 3),
        "before_count": round(kernel.before_count, 2),
        "now_count": round(kernel.now_count, 2),
        "ratio": None if kernel.ratio is None else round(kernel.ratio, 4),
    }


def compare_captures(
    capture: Sequence[Measures], baseline: Sequence[Measures]
) -> tuple[Comparison, ...]:
    """Each rank with itself; a rank that the baseline lacks with the baseline's first."""
    if not baseline:
        return ()
    ranks = {m.rank: m for m in baseline}
    pairs = [(m, ranks.get(m.rank, baseline[0])) for m in capture]
    found = (compare(now, before) for now, before in pairs)
    return tuple(comparison for comparison in found if comparison is not None)


def compare(now: Measures, before: Measures) -> Comparison | None:
    """None where only one of them has a GPU, or a step cannot be told from the other's."""
    if (now.gpu is None) != (before.gpu is None) or bool(now.steps) != bool(before.steps):
        return None
    phases_now, phases_before = phases_ms(now), phases_ms(before)
    phases = [
        PhaseChange(phase, phases_before.get(phase, 0.0), phases_now.get(phase, 0.0))
        for phase in {**phases_before, **phases_now}
    ]
    phases.sort(key=lambda p: (-abs(p.change_ms), p.phase))
    kernels = kernel_changes(now, before)
    return Comparison(
        label=now.label,
        rank=now.rank,
        before_step_ms=before.window_us / _steps(before) / 1e3,
        now_step_ms=now.window_us / _steps(now) / 1e3,
        phases=tuple(phases),
        kernels=tuple(kernels[:_SHOWN]),
        slowdown=slowdown(now.gpu.sizes, before.gpu.sizes) if now.gpu and before.gpu else None,
    )


def phases_ms(measures: Measures) -> dict[str, float]:
    """Disjoint parts of the window, in ms per step."""
    steps = _steps(measures) * 1e3
    if measures.gpu is not None:
        return {phase: us / steps for phase, us in _gpu_phases_us(measures.gpu).items()}
    if measures.cpu is None:
        return {}
    cpu = measures.cpu
    parts = {
        "data_loading": measures.loading,
        "compile": cpu.compile,
        "gc": cpu.gc,
        "checkpoint": cpu.checkpoint,
        "operators": cpu.operators,
        "collective_wait": cpu.waiting,
        "host": cpu.host,
    }
    return {phase: total(intervals) / steps for phase, intervals in parts.items()}


def _gpu_phases_us(gpu: GpuTime) -> Mapping[str, float]:
    exposed = gpu.exposed_communication
    rest = difference(difference(gpu.busy, gpu.compute), exposed)
    busy = {
        "compute": total(gpu.compute),
        "exposed_communication": total(exposed),
        "exposed_copies": total(rest),
    }
    return busy | {f"idle: {cause}": gpu.idle_time.total_us(cause) for cause in CAUSES}


def _steps(measures: Measures) -> int:
    return len(measures.steps) or 1


def kernel_changes(now: Measures, before: Measures) -> list[KernelChange]:
    """Largest change first; collectives are left out, whose kernels wait for other ranks."""
    if now.gpu is None or before.gpu is None:
        return []
    new, old = _by_name(now.gpu), _by_name(before.gpu)
    changes = [
        _kernel_change(new.get(name), old.get(name), _steps(now), _steps(before))
        for name in {**old, **new}
        if (name in new or _surely_absent(old[name], before, now))
        and (name in old or _surely_absent(new[name], now, before))
    ]
    return sorted(changes, key=lambda k: (-abs(k.change_ms), k.name))


def _by_name(gpu: GpuTime) -> dict[str, KernelTime]:
    return {k.name: k for k in gpu.kernel_times if k.kernel_class != "communication"}


def _surely_absent(kernel: KernelTime, mine: Measures, other: Measures) -> bool:
    """Whether the other trace lacks the kernel: its list ends with its TOP longest kernels."""
    listed = other.gpu.kernel_times if other.gpu else ()
    shortest_us = listed[-1].total_us / _steps(other) if len(listed) >= TOP else 0.0
    return kernel.total_us / _steps(mine) > shortest_us


def _kernel_change(
    new: KernelTime | None, old: KernelTime | None, new_steps: int, old_steps: int
) -> KernelChange:
    known = new or old
    assert known is not None
    return KernelChange(
        name=known.name,
        kernel_class=known.kernel_class,
        before_ms=old.total_us / old_steps / 1e3 if old else 0.0,
        now_ms=new.total_us / new_steps / 1e3 if new else 0.0,
        before_count=old.count / old_steps if old else 0.0,
        now_count=new.count / new_steps if new else 0.0,
        ratio=new.median_us / old.median_us if new and old and old.median_us else None,
    )
