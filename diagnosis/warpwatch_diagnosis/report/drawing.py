"""Draws rows of coloured spans as SVG that stretches with the page, and bars of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.measures.steps import LaneSpan
from warpwatch_diagnosis.report.parts import Breakdown, TimeParts, steps_us, sums_us
from warpwatch_diagnosis.report.words import LANES, PARTS, duration, origin, safe

# The units of the drawing, which the page stretches to its width.
WIDTH = 1_000.0
# A screen has no more pixels, and the drawing stays below 100 kB for any trace.
MAX_RECTANGLES = 2_000
# Named rectangles show a title when pointed at; more of them would make the file large.
_NAMED = 25
_MIN_NAMED_WIDTH = 3.0


def shares(counts: Sequence[int], budget: int = MAX_RECTANGLES) -> list[int]:
    """Return the number of marks for each row; long rows get the rest of short ones."""
    given = [0] * len(counts)
    left = budget
    for place, row in enumerate(sorted(range(len(counts)), key=lambda row: counts[row])):
        given[row] = min(counts[row], left // (len(counts) - place))
        left -= given[row]
    return given


def thin(marks: Iterable[LaneSpan], limit: int) -> list[LaneSpan]:
    """Reduce to at most ``limit`` marks: neighbours of one colour merge, and slivers."""
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


def _merged(marks: list[LaneSpan], near_us: float) -> list[LaneSpan]:
    """Merge close marks of one colour, and slivers into the colour of the longer one."""
    kept: list[LaneSpan] = []
    for mark in marks:
        last = kept[-1] if kept else None
        if last is not None and mark.begin_us - last.end_us < near_us:
            us, last_us = mark.end_us - mark.begin_us, last.end_us - last.begin_us
            if last.label == mark.label or max(us, last_us) < near_us:
                longer = mark if us > last_us else last
                end_us = max(last.end_us, mark.end_us)
                kept[-1] = LaneSpan(last.begin_us, end_us, longer.label, longer.name)
                continue
        kept.append(mark)
    return kept


def row(marks: Sequence[LaneSpan], span_us: float, title: str, height: int = 10) -> str:
    """Return one SVG; ``title`` describes it in words, ``span_us`` is the time of its width."""
    scale = WIDTH / span_us if span_us > 0 else 0.0
    longest = sorted(range(len(marks)), key=lambda n: marks[n].begin_us - marks[n].end_us)[:_NAMED]
    named = {n for n in longest if _width(marks[n], scale) >= _MIN_NAMED_WIDTH}
    paths: dict[str, list[str]] = defaultdict(list)
    rectangles = []
    for n, mark in enumerate(marks):
        x, width = mark.begin_us * scale, max(0.3, _width(mark, scale))
        if n in named:
            described = f"{LANES[mark.label]}, {duration(mark.end_us - mark.begin_us)}"
            described += f": {mark.name}" if mark.name else ""
            rectangles.append(
                f'<rect class="p-{mark.label}" x="{_short(x)}" width="{_short(width)}" '
                f'height="{height}"><title>{safe(described)}</title></rect>'
            )
        else:
            paths[mark.label].append(f"M{_short(x)} 0h{_short(width)}v{height}h-{_short(width)}z")
    drawn = "".join(f'<path class="p-{label}" d="{"".join(d)}"/>' for label, d in paths.items())
    return (
        f'<svg class="row" role="img" aria-label="{safe(title)}" viewBox="0 0 1000 {height}" '
        f'preserveAspectRatio="none">{drawn}{"".join(rectangles)}</svg>'
    )


def _width(mark: LaneSpan, scale: float) -> float:
    return (mark.end_us - mark.begin_us) * scale


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def legend(labels: Iterable[str]) -> str:
    """Return the colours and their meaning, each once, in the order of LANES."""
    present = set(labels)
    items = "".join(
        f'<li><i class="b-{label}"></i>{safe(LANES[label])}</li>'
        for label in LANES
        if label in present
    )
    return f'<ul class="legend">{items}</ul>'


def axis(span_us: float) -> str:
    """Return the times under a drawing."""
    ticks = "".join(f"<span>{duration(span_us * part / 4)}</span>" for part in range(5))
    return f'<div class="axis" aria-hidden="true">{ticks}</div>'


# A capture of the daemon has fewer steps, and a page of this many is still clear.
MAX_STEPS = 24
MAX_RANKS = 64
# A smaller share would read as 0.0 %.
MIN_SHARE = 0.0005
# This share of the longest bar is about two pixels.
MIN_SEEN = 0.002
_NAMED_PARTS = 3


def time_bars(breakdown: Breakdown, chosen: Measures) -> str:
    """Draw the chosen rank part by part, and each of several ranks as one bar."""
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
    """Return part, share of the window and µs per step, largest first, without tiny ones."""
    spent = sums_us(parts)
    window_us, steps = measures.window_us or 1.0, measures.step_count
    return [
        (part, spent[part] / window_us, spent[part] / steps)
        for part in sorted(spent, key=lambda part: -spent[part])
        if spent[part] / window_us >= MIN_SHARE
    ]


def _by_part(parts: TimeParts, measures: Measures) -> str:
    """Draw one bar per part; the parts add up to the window."""
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
    """Draw bars of parts behind each other; the legend omits parts too thin to be seen."""
    rows = "".join(_stack(*both, span_us) for both in zip(titles, stacks, strict=True))
    least_us = MIN_SEEN * span_us
    seen = (part for spent in stacks for part, us in spent.items() if us >= least_us)
    return rows + legend(seen)


def _stack(title: str, spent: Mapping[str, float], span_us: float) -> str:
    marks = []
    reached_us = 0.0
    for part, us in spent.items():
        marks.append(LaneSpan(reached_us, reached_us + us, part, None))
        reached_us += us
    largest = sorted(spent, key=lambda part: -spent[part])[:_NAMED_PARTS]
    words = ", ".join(f"{PARTS[part].lower()} {duration(spent[part])}" for part in largest)
    picture = row(marks, span_us, f"{title}: {words}")
    return f'<div class="lane"><span>{safe(title)}</span>{picture}</div>'


def step_bars(breakdown: Breakdown, chosen: Measures) -> str:
    """Draw each step of the chosen rank; of many steps the longest, in order."""
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
