"""Compares two traces of the same work by phase of the step, and by kernel or operator.

The traces come from one job before and after a change, or from a slow rank and a typical one. The
phases of a step are disjoint and add up to it, so their changes add up to the change of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from warpwatch_diagnosis.intervals import Intervals, total
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.gpu_work import MAX_SPREAD, TOP, KernelClass, KernelTime, slowdown
from warpwatch_diagnosis.measures.host_events import CAUSES
from warpwatch_diagnosis.measures.iterations import is_like
from warpwatch_diagnosis.measures.measures import Measures, plain
from warpwatch_diagnosis.words import short

# If the kernels per step differ by at most this share, the work is the same.
SAME_COUNT = 0.02
# A step that is longer than this, relative to the baseline, is slower (TraceML's warning level).
MIN_STEP_RATIO = 1.10
# A smaller share of the step is not reported as a change.
MIN_REPORTED_SHARE = 0.01
# The cause of a change explains this share of it (own value).
MIN_EXPLAINED = 0.5
_SHOWN = 10


Change = Literal["new", "gone", "slower", "faster", "more", "fewer", "same"]


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """One phase, in ms per step: a part of GPU time, or an idle cause as ``idle: <cause>``."""

    phase: str
    before_ms: float
    now_ms: float
    change_ms: float

    def __str__(self) -> str:
        words = self.phase.replace("_", " ")
        cause = words.removeprefix("idle: ")
        title = words if cause == words else f"idle time ({cause})"
        both = f"{self.before_ms:,.1f} ms -> {self.now_ms:,.1f} ms"
        return f"{title}: {both} ({self.change_ms:+,.1f} ms)"


@dataclass(frozen=True, slots=True)
class KernelChange:
    """All kernels of one name, per step.

    ratio: the median duration now divided by that before; None if only one trace has the kernel.
    """

    name: str
    kernel_class: KernelClass
    change: Change
    before_ms: float
    now_ms: float
    change_ms: float
    before_count: float
    now_count: float
    ratio: float | None

    def __str__(self) -> str:
        name, both = short(self.name), f"{self.before_ms:,.2f} ms -> {self.now_ms:,.2f} ms"
        text = f"kernel {name} is {self.change}: {both}"
        if self.change in ("more", "fewer"):
            text += f", {self.before_count:,.0f} -> {self.now_count:,.0f} times"
        return text


@dataclass(frozen=True, slots=True)
class OperatorChange:
    """All calls of one operator on the CPU, in ms per step, without the operators that it calls."""

    name: str
    before_ms: float
    now_ms: float
    change_ms: float

    def __str__(self) -> str:
        return f"operator {short(self.name)}: {self.before_ms:,.2f} ms -> {self.now_ms:,.2f} ms"


AnyChange = PhaseChange | KernelChange | OperatorChange


@dataclass(frozen=True, slots=True)
class BaselineComparison:
    """The changes of a rank since the baseline, largest first; at most ten kernels or operators.

    slowdown_ratio: the factor by which all kernels are slower, as with lower clocks; else None.
    a_step: the words for a step, which is an iteration in a server.
    """

    rank: int | None
    before_step_ms: float
    now_step_ms: float
    slowdown_ratio: float | None
    phases: tuple[PhaseChange, ...]
    kernels: tuple[KernelChange, ...]
    operators: tuple[OperatorChange, ...]
    label: str
    a_step: str

    @property
    def is_slower(self) -> bool:
        """Whether the step, or all kernels alike, are longer by more than MIN_STEP_RATIO."""
        steps = self.now_step_ms / self.before_step_ms if self.before_step_ms else 1.0
        return max(steps, self.slowdown_ratio or 0.0) > MIN_STEP_RATIO

    @property
    def compute_ms(self) -> float:
        """The time by which the step's kernels, or operators on the CPU, grew."""
        return sum(p.change_ms for p in self.phases if p.phase in ("compute", "operators"))

    @property
    def grown(self) -> AnyChange:
        """The kernel or operator that grew most, or the phase if it grew by far more."""
        phase: AnyChange = max(self.phases, key=lambda one: one.change_ms)
        work: list[AnyChange] = [*self.kernels, *self.operators]
        most = max(work, key=lambda one: one.change_ms, default=phase)
        return most if most.change_ms >= MIN_EXPLAINED * phase.change_ms else phase

    @property
    def summary(self) -> str:
        """A sentence on the step and the change that explains most of it."""
        return f"{self.sentences[0]}; {self._alike or self._named(self.grown)}"

    @property
    def sentences(self) -> tuple[str, ...]:
        """Sentences on the step, the phases, then the kernels that changed."""
        least_ms = MIN_REPORTED_SHARE * max(self.before_step_ms, self.now_step_ms)
        changes: list[AnyChange] = [*self.phases]
        if self.slowdown_ratio is None:
            changes += [*self.kernels, *self.operators]
        return (
            f"{self.label}: {self.a_step} takes {self.now_step_ms:,.1f} ms, "
            f"in the baseline {self.before_step_ms:,.1f} ms",
            *(self._named(one) for one in changes if abs(one.change_ms) >= least_ms),
            *filter(None, [self._alike]),
        )

    @property
    def _alike(self) -> str:
        if self.slowdown_ratio is None:
            return ""
        slower = 100 * (self.slowdown_ratio - 1)
        return f"the same kernels are all {slower:.0f} % slower, as with lower clocks"

    def _named(self, change: AnyChange) -> str:
        return str(change) if isinstance(change, PhaseChange) else f"{change} {self.a_step}"

    def to_json(self) -> dict[str, Any]:
        """Return one entry of ``comparison``."""
        return {**plain(self, without=("label", "a_step")), "sentences": list(self.sentences)}


def compare_captures(
    capture: Sequence[Measures], baseline: Sequence[Measures]
) -> tuple[BaselineComparison, ...]:
    """Compare each rank with the same rank of the baseline, or else with the baseline's first."""
    if not baseline:
        return ()
    ranks = {m.rank: m for m in baseline}
    found = (compare(m, ranks.get(m.rank, baseline[0])) for m in capture)
    return tuple(comparison for comparison in found if comparison is not None)


def compare(now: Measures, before: Measures) -> BaselineComparison | None:
    """Compare two traces; return None if they differ in kind.

    Either both or neither must have a GPU, annotated steps, and a server's iterations of like work.
    """
    if (now.gpu is None) != (before.gpu is None) or bool(now.steps) != bool(before.steps):
        return None
    if not is_like(now.server, before.server):
        return None
    phases_now, phases_before = phases_ms(now), phases_ms(before)
    phases = [
        PhaseChange(phase, old, new, new - old)
        for phase in {**phases_before, **phases_now}
        if not phase.endswith("waiting_for_work")
        for old, new in [(phases_before.get(phase, 0.0), phases_now.get(phase, 0.0))]
    ]
    phases.sort(key=lambda p: (-abs(p.change_ms), p.phase))
    return BaselineComparison(
        rank=now.rank,
        before_step_ms=before.step_us / 1e3,
        now_step_ms=now.step_us / 1e3,
        slowdown_ratio=slowdown(now.gpu.sizes, before.gpu.sizes)
        if now.gpu and before.gpu
        else None,
        phases=tuple(phases),
        kernels=tuple(kernel_changes(now, before)[:_SHOWN]),
        operators=tuple(operator_changes(now, before)[:_SHOWN]),
        label=now.label,
        a_step="an iteration" if now.server else "a step",
    )


def phases_ms(measures: Measures) -> dict[str, float]:
    """Return disjoint parts of the window, in ms per step."""
    parts = _gpu_phases(measures.gpu) if measures.gpu else cpu_phases(measures)
    return {phase: total(spent) / (measures.step_count * 1e3) for phase, spent in parts.items()}


def _gpu_phases(gpu: GpuTime) -> Mapping[str, Intervals]:
    busy = {
        "compute": gpu.compute,
        "exposed_communication": gpu.exposed_communication,
        "exposed_copies": gpu.exposed_copies,
    }
    idle = gpu.idle_time.by_cause
    return busy | {f"idle: {cause}": idle[cause] for cause in CAUSES if cause in idle}


def cpu_phases(measures: Measures) -> dict[str, Intervals]:
    """Return disjoint parts of the training thread's time; empty with a GPU."""
    cpu = measures.cpu
    if cpu is None:
        return {}
    return {
        "data_loading": measures.loading,
        "compile": cpu.compile,
        "gc": cpu.gc,
        "checkpoint": cpu.checkpoint,
        "operators": cpu.operators,
        "collective_wait": cpu.waiting,
        "host": cpu.host,
        **({"scheduler": cpu.scheduler} if cpu.scheduler else {}),
        **({"waiting_for_work": cpu.waiting_for_work} if cpu.waiting_for_work else {}),
    }


def kernel_changes(now: Measures, before: Measures) -> list[KernelChange]:
    """Return changes, largest first, except of collectives: their kernels wait for other ranks."""
    if now.gpu is None or before.gpu is None:
        return []
    new, old = _by_name(now.gpu), _by_name(before.gpu)
    changes = [
        _kernel_change(new.get(name), old.get(name), now.step_count, before.step_count)
        for name in {**old, **new}
        if (name in new or _surely_absent(old[name], before, now))
        and (name in old or _surely_absent(new[name], now, before))
    ]
    return sorted(changes, key=lambda k: (-abs(k.change_ms), k.name))


def operator_changes(now: Measures, before: Measures) -> list[OperatorChange]:
    """Return changes, largest first; empty with a GPU, where kernels show them."""
    if now.gpu is not None or before.gpu is not None:
        return []
    new, old = _self_ms(now), _self_ms(before)
    shortest_ms = max(_shortest_ms(now), _shortest_ms(before))
    changes = [
        OperatorChange(name, before_ms, now_ms, now_ms - before_ms)
        for name in {**old, **new}
        for before_ms, now_ms in [(old.get(name, 0.0), new.get(name, 0.0))]
        if (name in new and name in old) or max(before_ms, now_ms) > shortest_ms
    ]
    return sorted(changes, key=lambda o: (-abs(o.change_ms), o.name))


def _self_ms(measures: Measures) -> dict[str, float]:
    found: dict[str, float] = {}
    for time in measures.operators.by_self_time:
        spent_ms = time.self_us / measures.step_count / 1e3
        found[time.name] = found.get(time.name, 0.0) + spent_ms
    return found


def _shortest_ms(measures: Measures) -> float:
    """Return the time per step that an unlisted operator takes at most."""
    listed = measures.operators.by_self_time
    return listed[-1].self_us / measures.step_count / 1e3 if len(listed) >= TOP else 0.0


def _by_name(gpu: GpuTime) -> dict[str, KernelTime]:
    return {k.name: k for k in gpu.kernel_times if k.kernel_class != "communication"}


def _surely_absent(kernel: KernelTime, mine: Measures, other: Measures) -> bool:
    """Return whether ``other`` lacks the kernel: it lists only its TOP longest kernels."""
    listed = other.gpu.kernel_times if other.gpu else ()
    shortest_us = listed[-1].total_us / other.step_count if len(listed) >= TOP else 0.0
    return kernel.total_us / mine.step_count > shortest_us


def _kernel_change(
    new: KernelTime | None, old: KernelTime | None, new_steps: int, old_steps: int
) -> KernelChange:
    known = new or old
    assert known is not None
    before_ms = old.total_us / old_steps / 1e3 if old else 0.0
    now_ms = new.total_us / new_steps / 1e3 if new else 0.0
    before_count = old.count / old_steps if old else 0.0
    now_count = new.count / new_steps if new else 0.0
    ratio = new.median_us / old.median_us if new and old and old.median_us else None
    change = _change(before_count, now_count, ratio)
    return KernelChange(
        known.name, known.kernel_class, change, before_ms, now_ms, now_ms - before_ms,
        before_count, now_count, ratio,
    )  # fmt: skip


def _change(before_count: float, now_count: float, ratio: float | None) -> Change:
    if not before_count or not now_count:
        return "gone" if before_count else "new"
    if abs(now_count / before_count - 1) > SAME_COUNT:
        return "more" if now_count > before_count else "fewer"
    if ratio is None or abs(ratio - 1) <= MAX_SPREAD:
        return "same"
    return "slower" if ratio > 1 else "faster"
