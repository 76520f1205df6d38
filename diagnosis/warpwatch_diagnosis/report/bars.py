"""Bars: where the window went on each rank, and each step of the chosen one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.report.drawing import DrawnSpan, legend, row
from warpwatch_diagnosis.report.parts import Breakdown, TimeParts, steps_us, sums_us
from warpwatch_diagnosis.report.words import PARTS, duration, origin, safe

# More than any capture of the daemon holds, and still to be overlooked.
MAX_STEPS = 24
MAX_RANKS = 64
# Less would read as 0.0 %.
MIN_SHARE = 0.0005
# Of the longest bar: about two pixels.
MIN_SEEN = 0.002
_NAMED_PARTS = 3


def shares(breakdown: Breakdown, chosen: Measures) -> str:
    """The chosen rank part by part; of several ranks each as one bar as well."""
    parts = breakdown.parts(chosen)
    if not parts:
        return ""
    whose = f" on {chosen.label}" if breakdown.several else ""
    return (
        f"<h2>Where the time goes{safe(whose)}</h2>"
        f'<section class="card"><p class="soft">{safe(origin(chosen))}</p>'
        f"{_by_part(parts, chosen)}</section>{_all_ranks(breakdown) if breakdown.several else ''}"
    )


def largest_parts(parts: TimeParts, measures: Measures) -> list[tuple[str, float, float]]:
    """Part, share of the window, and µs of each step; largest first, without what reads as 0."""
    spent = sums_us(parts)
    window_us, steps = measures.window_us or 1.0, measures.step_count
    return [
        (part, spent[part] / window_us, spent[part] / steps)
        for part in sorted(spent, key=lambda part: -spent[part])
        if spent[part] / window_us >= MIN_SHARE
    ]


def _by_part(parts: TimeParts, measures: Measures) -> str:
    """The parts add up to the window."""
    lines = "".join(
        f'<div class="bar-row"><span>{safe(PARTS[part])}</span><span class="bar">'
        f'<i class="b-{part}" style="width:{100 * min(1.0, share):.1f}%"></i></span>'
        f"<b>{100 * share:.1f} %</b><em>{duration(us)}</em></div>"
        for part, share, us in largest_parts(parts, measures)
    )
    each = "a step" if measures.steps else "in all"
    head = f'<div class="bar-row head"><span></span><span></span><b>share</b><em>{each}</em></div>'
    return head + lines


def _all_ranks(breakdown: Breakdown) -> str:
    shown = breakdown.ranks[:MAX_RANKS]
    stacks = [sums_us(breakdown.parts(m)) for m in shown]
    longest_us = max((m.window_us for m in shown), default=0.0)
    titles = [f"{m.label} · {duration(m.window_us)}" for m in shown]
    rest = len(breakdown.ranks) - len(shown)
    more = f'<p class="soft">{rest} more ranks are not shown.</p>' if rest else ""
    return (
        '<h2>Where the time goes on every rank</h2><section class="card">'
        f"{_stacks(titles, stacks, longest_us)}{more}</section>"
    )


def _stacks(titles: Sequence[str], stacks: Sequence[Mapping[str, float]], span_us: float) -> str:
    """Bars of parts behind each other; the legend leaves out what is too thin to be seen."""
    rows = "".join(_stack(*both, span_us) for both in zip(titles, stacks, strict=True))
    least_us = MIN_SEEN * span_us
    seen = (part for spent in stacks for part, us in spent.items() if us >= least_us)
    return rows + legend(seen)


def _stack(title: str, spent: Mapping[str, float], span_us: float) -> str:
    marks = []
    reached_us = 0.0
    for part, us in spent.items():
        marks.append(DrawnSpan(reached_us, reached_us + us, part))
        reached_us += us
    largest = sorted(spent, key=lambda part: -spent[part])[:_NAMED_PARTS]
    words = ", ".join(f"{PARTS[part].lower()} {duration(spent[part])}" for part in largest)
    picture = row(marks, span_us, f"{title}: {words}")
    return f'<div class="lane"><span>{safe(title)}</span>{picture}</div>'


def steps(breakdown: Breakdown, chosen: Measures) -> str:
    """Each step of the chosen rank; of many the longest, in their order."""
    times = chosen.per_step
    if len(times) < 2:
        return ""
    longest = sorted(range(len(times)), key=lambda n: -times[n].duration_us)[:MAX_STEPS]
    drawn = sorted(longest)
    spent = steps_us(breakdown.parts(chosen), [chosen.steps[n] for n in drawn])
    titles = [f"Step {times[n].number} · {duration(times[n].duration_us)}" for n in drawn]
    span_us = max(times[n].duration_us for n in drawn)
    which = "" if len(drawn) == len(times) else f" (the longest {MAX_STEPS} of {len(times)})"
    whose = f" of {chosen.label}" if breakdown.several else ""
    return (
        f"<h2>Step by step{safe(whose)}{which}</h2>"
        f'<section class="card">{_stacks(titles, spent, span_us)}</section>'
    )
