"""Rows of coloured spans as SVG that stretches with the page; text stays in HTML beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.report.parts import Breakdown, TimeParts, steps_us, sums_us
from warpwatch_diagnosis.report.words import LANES, PARTS, duration, origin, safe

# In units of the drawing, which the page stretches to its width.
WIDTH = 1_000.0
# As many as a screen has pixels, and no more than 100 kB, whatever the trace holds.
MAX_RECTANGLES = 2_000
# Named ones show what they are when pointed at; the rest would make the file large.
_NAMED = 25
_MIN_NAMED_WIDTH = 3.0


@dataclass(frozen=True, slots=True)
class DrawnSpan:
    """A coloured span in µs. ``label``: of LANES; ``name``: of what it is, if known."""

    begin_us: float
    end_us: float
    label: str
    name: str | None = None


def shares(counts: Sequence[int], budget: int = MAX_RECTANGLES) -> list[int]:
    """How many marks each row may have: what short rows leave goes to the long ones."""
    given = [0] * len(counts)
    left = budget
    for place, row in enumerate(sorted(range(len(counts)), key=lambda row: counts[row])):
        given[row] = min(counts[row], left // (len(counts) - place))
        left -= given[row]
    return given


def thin(marks: Iterable[DrawnSpan], limit: int) -> list[DrawnSpan]:
    """At most ``limit`` marks that look alike: neighbours of one colour merge, and slivers."""
    found = sorted(marks, key=lambda m: (m.begin_us, m.end_us))
    if len(found) <= limit or not found:
        return found
    if limit < 1:
        return []
    near_us = (max(m.end_us for m in found) - found[0].begin_us) / (2 * limit)
    while len(found) > limit:
        found = _merged(found, near_us)
        near_us *= 1.5
    return found


def _merged(marks: list[DrawnSpan], near_us: float) -> list[DrawnSpan]:
    """Close marks of one colour become one, and slivers in the colour of the longer one."""
    kept: list[DrawnSpan] = []
    for mark in marks:
        last = kept[-1] if kept else None
        if last is not None and mark.begin_us - last.end_us < near_us:
            us, last_us = mark.end_us - mark.begin_us, last.end_us - last.begin_us
            if last.label == mark.label or max(us, last_us) < near_us:
                longer = mark if us > last_us else last
                end_us = max(last.end_us, mark.end_us)
                kept[-1] = DrawnSpan(last.begin_us, end_us, longer.label, longer.name)
                continue
        kept.append(mark)
    return kept


def row(marks: Sequence[DrawnSpan], span_us: float, title: str, height: int = 10) -> str:
    """One SVG: ``title`` says in words what it shows; ``span_us``: what its width stands for."""
    scale = WIDTH / span_us if span_us > 0 else 0.0
    longest = sorted(range(len(marks)), key=lambda n: marks[n].begin_us - marks[n].end_us)[:_NAMED]
    named = {n for n in longest if _width(marks[n], scale) >= _MIN_NAMED_WIDTH}
    paths: dict[str, list[str]] = defaultdict(list)
    rectangles = []
    for n, mark in enumerate(marks):
        x, width = mark.begin_us * scale, max(0.3, _width(mark, scale))
        if n in named:
            rectangles.append(
                f'<rect class="p-{mark.label}" x="{_short(x)}" width="{_short(width)}" '
                f'height="{height}"><title>{safe(_described(mark))}</title></rect>'
            )
        else:
            paths[mark.label].append(f"M{_short(x)} 0h{_short(width)}v{height}h-{_short(width)}z")
    drawn = "".join(f'<path class="p-{label}" d="{"".join(d)}"/>' for label, d in paths.items())
    return (
        f'<svg class="row" role="img" aria-label="{safe(title)}" viewBox="0 0 1000 {height}" '
        f'preserveAspectRatio="none">{drawn}{"".join(rectangles)}</svg>'
    )


def _width(mark: DrawnSpan, scale: float) -> float:
    return (mark.end_us - mark.begin_us) * scale


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _described(mark: DrawnSpan) -> str:
    what = f"{LANES[mark.label]}, {duration(mark.end_us - mark.begin_us)}"
    return f"{what}: {mark.name}" if mark.name else what


def legend(labels: Iterable[str]) -> str:
    """Colours and their meaning, each once, in the order of LANES."""
    present = set(labels)
    items = "".join(
        f'<li><i class="b-{label}"></i>{safe(LANES[label])}</li>'
        for label in LANES
        if label in present
    )
    return f'<ul class="legend">{items}</ul>'


def axis(span_us: float) -> str:
    """Times under a drawing."""
    ticks = "".join(f"<span>{duration(span_us * part / 4)}</span>" for part in range(5))
    return f'<div class="axis" aria-hidden="true">{ticks}</div>'


# More than any capture of the daemon holds, and still to be overlooked.
MAX_STEPS = 24
MAX_RANKS = 64
# Less would read as 0.0 %.
MIN_SHARE = 0.0005
# Of the longest bar: about two pixels.
MIN_SEEN = 0.002
_NAMED_PARTS = 3


def time_bars(breakdown: Breakdown, chosen: Measures) -> str:
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


def step_bars(breakdown: Breakdown, chosen: Measures) -> str:
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
