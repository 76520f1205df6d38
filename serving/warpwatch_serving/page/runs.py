"""Runs: the newest of each job, and one beside the one before it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlencode

from warpwatch_detection.runs import GROWTH, LEAST_S, RunComparison, compare, differences
from warpwatch_runtime.quantities import joules, plural, rate, seconds, text
from warpwatch_serving.bodies import RunFilters
from warpwatch_serving.page.charts import HEIGHT, OTHER, WIDTH, PhaseShare, phase_shares
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.state import State

MAX_RUNS = 12
# A smaller change of the step time is noise.
MIN_CHANGE = 0.02
# Bins of the histogram that are drawn; the longest steps are in the last.
MAX_BARS = 120
MIN_BARS = 24


def newest(known: Sequence[RunSummary]) -> Sequence[RunSummary]:
    return known[: -MAX_RUNS - 1 : -1]


def chosen(known: Sequence[RunSummary], wanted: RunFilters) -> RunSummary | None:
    """Return the newest run that the filters admit."""
    found = (one for one in reversed(known) if wanted.admits(job=one.job, owner=one.owner))
    return next((one for one in found if wanted.admits(run=one.run)), None)


def href(run: RunSummary) -> str:
    return f"/run?{urlencode(run.job_id.fields())}"


def began(run: RunSummary) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(run.first_time))


def took(run: RunSummary) -> str:
    return "runs" if run.end_time is None else seconds(run.end_time - run.first_time)


def raised(run: RunSummary) -> str:
    kinds = sorted(run.anomalies.items())
    return ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in kinds)


def before(run: RunSummary, known: Sequence[RunSummary]) -> RunComparison | None:
    """Compare with the newest earlier run of the job whose steps should take the same."""
    for other in reversed(known):
        same = (other.owner, other.job) == (run.owner, run.job)
        if same and other.first_time < run.first_time and not any(differences(other, run)):
            return compare(other, run)
    return None


def change(found: RunComparison | None) -> str:
    """Return the change of the median step; empty if it is small."""
    if found is None or found.step_ratio is None or abs(found.step_ratio - 1) < MIN_CHANGE:
        return ""
    share = f"{100 * (found.step_ratio - 1):+.1f} %".replace("-", "\N{MINUS SIGN}")
    grown = f", most of it in {text(found.grown, 24)}" if found.grown else ""
    return f"{share} since the run before" + (grown if found.step_ratio > 1 else "")


def facts(run: RunSummary) -> Iterator[tuple[str, str]]:
    """Yield names and facts, as far as they are known."""
    known = {
        "began": began(run),
        "took": took(run),
        "ranks": f"{len(run.ranks)} of {run.world_size}",
        "node": run.node,
        "GPU": run.gpu_model,
        "steps": str(run.steps),
        "step, median": seconds(run.step_p50_s),
        "step, 95 % below": seconds(run.step_p95_s),
        "rate": rate(run.tokens_per_s, "tokens") if run.tokens_per_s else "",
        "energy": joules(run.energy_j) if run.energy_j else "",
        "anomalies": raised(run),
        "step clock": run.step_clock,
        "framework": run.framework,
        "copy": run.remote,
    }
    return ((name, text(fact)) for name, fact in known.items() if fact)


def phases(run: RunSummary, total_s: float) -> list[PhaseShare]:
    """Return the phases that have names, so that the bars of two runs can be compared."""
    return [one for one in phase_shares(run.phases_s, total_s) if one.name != OTHER]


def longest_s(found: RunComparison) -> float:
    """Return the length to which the bars of both runs are drawn."""
    return max(sum(run.phases_s.values()) for run in (found.before, found.after))


def bars(run: RunSummary) -> list[tuple[float, float, float, float, str]]:
    """Return the bars of step durations: x, y, width, height and words each."""
    counts = run.step_counts
    if not counts:
        return []
    # A few bins stand in the middle.
    first = min(counts) - max(0, MIN_BARS - 1 - max(counts) + min(counts)) // 2
    shown: dict[int, int] = {}
    for number, count in counts.items():
        at = min(number - first, MAX_BARS - 1)
        shown[at] = count + shown.get(at, 0)
    width, top = WIDTH / max(max(shown) + 1, MIN_BARS), max(shown.values())
    return [
        (round(at * width, 1), round(HEIGHT - height, 1), round(width * 0.9, 1), round(height, 1),
         f"{seconds(LEAST_S * GROWTH ** (first + at))}: {plural(count, 'step')}")
        for at, count in sorted(shown.items())
        for height in (max(1.0, HEIGHT * count / top),)
    ]  # fmt: skip


def captures_of(run: RunSummary, state: State) -> Mapping[str, Capture | None]:
    """Return the captures of a run by id, None for one that was removed."""
    kept = {capture.id: capture for capture in state.captures}
    return {one: kept.get(one) for one in run.captures}
