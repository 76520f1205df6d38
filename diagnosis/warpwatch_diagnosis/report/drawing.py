"""Rows of coloured spans as SVG that stretches with the page; text stays in HTML beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from warpwatch_diagnosis.report.words import LANES, duration, safe

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
