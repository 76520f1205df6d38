"""Two runs side by side: how much longer a step takes, and which phase grew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from warpwatch_telemetry.runs import RunSummary

# Tokens a step that differ by less are the same.
SAME_WORK = 0.01


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """Mean seconds a step, 0 where a run has no such phase."""

    phase: str
    before_s: float
    after_s: float

    @property
    def grown_s(self) -> float:
        return self.after_s - self.before_s


@dataclass(frozen=True, slots=True)
class RunComparison:
    """``after`` against ``before``. step_ratio: of the medians, None where one is not known.

    phases: those that changed most first. grown: the phase that grew most, None where none did.
    differs: what makes them runs of different kinds, a sentence each.
    """

    before: RunSummary
    after: RunSummary
    step_ratio: float | None
    phases: tuple[PhaseChange, ...]
    grown: str | None
    differs: tuple[str, ...]


def compare(before: RunSummary, after: RunSummary) -> RunComparison:
    ratio = None
    if before.step_p50_s and after.step_p50_s:
        ratio = after.step_p50_s / before.step_p50_s
    phases = phase_changes(before.phases_s, after.phases_s)
    grown = max(phases, key=lambda change: change.grown_s, default=None)
    name = grown.phase if grown is not None and grown.grown_s > 0 else None
    return RunComparison(before, after, ratio, phases, name, tuple(differences(before, after)))


def phase_changes(
    before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[PhaseChange, ...]:
    names = sorted(before.keys() | after.keys())
    changes = [PhaseChange(name, before.get(name, 0.0), after.get(name, 0.0)) for name in names]
    return tuple(sorted(changes, key=lambda change: -abs(change.grown_s)))


def differences(before: RunSummary, after: RunSummary) -> Iterator[str]:
    """Why their steps are not expected to take the same."""
    for name in ("world_size", "gpu_model", "step_clock"):
        one, other = getattr(before, name), getattr(after, name)
        if one != other:
            yield f"{name}: {one} and {other}"
    for name in ("tokens_per_step", "samples_per_step"):
        one, other = getattr(before, name), getattr(after, name)
        if one is None and other is None:
            continue
        if one is None or other is None or abs(other / one - 1) > SAME_WORK:
            yield f"{name}: {_number(one)} and {_number(other)}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"
