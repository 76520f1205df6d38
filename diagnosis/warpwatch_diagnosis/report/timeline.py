"""Draws the longest step on a time axis: the lanes of one rank, and a row for each of several."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from warpwatch_diagnosis.measures.intervals import within
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.measures.steps import Lane, LaneSpan, StepTime
from warpwatch_diagnosis.report.drawing import MAX_RECTANGLES, axis, legend, row, shares, thin
from warpwatch_diagnosis.report.parts import Breakdown, TimeParts, clipped
from warpwatch_diagnosis.report.words import LANES, duration, safe, stream_label
from warpwatch_diagnosis.verdict.conclusion import Diagnosis

MAX_RANKS = 32
_NAMED_LABELS = 3


def timeline(breakdown: Breakdown, chosen: Measures) -> str:
    """Return HTML, empty without steps; ``chosen`` is the rank whose lanes are drawn."""
    if not breakdown.several:
        return _lanes(breakdown, chosen, MAX_RECTANGLES)
    half = MAX_RECTANGLES // 2
    return _ranks(breakdown, chosen, half) + _lanes(breakdown, chosen, half)


def _lanes(breakdown: Breakdown, measures: Measures, budget: int) -> str:
    drawn = measures.timeline
    if drawn is None:
        return ""
    marks = [_marks(lane) for lane in drawn.lanes]
    if measures.gpu is None:
        # Without a GPU the parts of the thread's time replace its lane of operators.
        step = max(measures.per_step, key=lambda s: (s.duration_us, -s.begin_us))
        marks = [_marks_of_parts(breakdown.parts(measures), step, 0.0), *marks[1:]]
    titles = [_title(lane, measures.server is not None) for lane in drawn.lanes]
    rows = "".join(
        f'<div class="lane"><span>{safe(title)}</span>{_row(title, found, drawn.duration_us)}</div>'
        for title, found in zip(titles, _fitting(marks, budget), strict=True)
    )
    whose = f" of {measures.label}" if breakdown.several else ""
    labels = [mark.label for found in marks for mark in found]
    return (
        f"<h2>The longest step{safe(whose)}</h2>"
        f'<p class="soft">Step {drawn.number}, {duration(drawn.duration_us)}.</p>'
        f'<section class="card">{rows}{axis(drawn.duration_us)}{legend(labels)}</section>'
    )


def _marks(lane: Lane) -> list[LaneSpan]:
    if lane.kind == "stream":
        return [LaneSpan(s.begin_us, s.end_us, stream_label(s.label), s.name) for s in lane.spans]
    # In lanes of the host and of idleness, a collective blocks the thread.
    labels = {label: label for label in LANES} | {"communication": "blocked"}
    return [
        LaneSpan(s.begin_us, s.end_us, labels[s.label], s.name)
        for s in lane.spans
        if s.label in labels
    ]


def _fitting(marks: list[list[LaneSpan]], budget: int) -> list[list[LaneSpan]]:
    limits = shares([len(found) for found in marks], budget)
    return [thin(found, limit) for found, limit in zip(marks, limits, strict=True)]


def _title(lane: Lane, serves: bool) -> str:
    if lane.kind == "host":
        return "CPU, worker thread" if serves else "CPU, training thread"
    if lane.kind == "idle":
        return "GPU idle, by cause"
    device, _, stream = lane.name.partition("/")
    return f"GPU {device}, stream {stream.removeprefix('stream ')}"


def _row(title: str, marks: Sequence[LaneSpan], span_us: float) -> str:
    """Draw a row, with its largest labels in words for readers who cannot see it."""
    spent_us: dict[str, float] = defaultdict(float)
    for mark in marks:
        spent_us[mark.label] += mark.end_us - mark.begin_us
    most = sorted(spent_us, key=lambda label: -spent_us[label])[:_NAMED_LABELS]
    scale = 100 / span_us if span_us > 0 else 0.0
    words = [f"{LANES[label].lower()} {scale * spent_us[label]:.0f} %" for label in most]
    return row(marks, span_us, f"{title}: {', '.join(words) or 'nothing'}")


def _ranks(breakdown: Breakdown, chosen: Measures, budget: int) -> str:
    """Draw one step on every rank that has it."""
    if not chosen.per_step:
        return ""
    number = _step_with_most_waiting(breakdown, chosen)
    shown, rest = _ranks_with_step(breakdown, chosen, number)
    diagnosis = breakdown.diagnosis
    windows = [_window(diagnosis, measures, step) for measures, step in shown]
    low = min(begin for begin, _ in windows)
    span_us = max(end for _, end in windows) - low
    marks = [
        _marks_of_parts(breakdown.parts(measures), step, begin - low)
        for (measures, step), (begin, _) in zip(shown, windows, strict=True)
    ]
    drawn = _fitting(marks, budget)
    rows = "".join(
        _rank_row(diagnosis, measures, step, found, span_us)
        for (measures, step), found in zip(shown, drawn, strict=True)
    )
    aligned = "clocks aligned at the ends of collectives"
    clock = aligned if diagnosis.alignment else "each from its own begin of the step"
    more = f" {rest} more ranks are not shown." if rest else ""
    return (
        f"<h2>Step {number} on every rank</h2>"
        f'<p class="soft">One row a rank, {clock}.{more}</p>'
        f'<section class="card">{rows}{axis(span_us)}'
        f"{legend(mark.label for found in drawn for mark in found)}</section>"
    )


def _window(diagnosis: Diagnosis, measures: Measures, step: StepTime) -> tuple[float, float]:
    """Return the step's times on the common clock; without one it begins at 0."""
    offset_us = diagnosis.clock_offset_us(measures)
    origin_us = step.begin_us if offset_us is None else offset_us
    return step.begin_us - origin_us, step.end_us - origin_us


def _ranks_with_step(
    breakdown: Breakdown, chosen: Measures, number: int
) -> tuple[list[tuple[Measures, StepTime]], int]:
    """Return up to MAX_RANKS ranks and steps, including the chosen one, and the number left out."""
    having = [(m, s) for m in breakdown.ranks for s in m.per_step if s.number == number]
    first = sorted(range(len(having)), key=lambda n: having[n][0] is not chosen)[:MAX_RANKS]
    return [having[n] for n in sorted(first)], len(having) - len(first)


def _step_with_most_waiting(breakdown: Breakdown, chosen: Measures) -> int:
    """Return the chosen rank's step in which ranks wait most for each other, else the longest.

    A device that is behind its host does a step's communication in the window of the next one.
    """
    waited_us: Counter[int] = Counter()
    for measures in breakdown.ranks:
        waits = breakdown.parts(measures).get("rank_wait", [])
        spent = within(waits, measures.steps)
        for step, us in zip(measures.per_step, spent, strict=True):
            waited_us[step.number] += round(us)
    steps = chosen.per_step
    return max(steps, key=lambda s: (waited_us[s.number], s.duration_us, -s.number)).number


def _marks_of_parts(parts: TimeParts, step: StepTime, at_us: float) -> list[LaneSpan]:
    """Return the parts within the step, which begins at ``at_us`` of the drawing."""
    moved_us = at_us - step.begin_us
    return [
        LaneSpan(begin + moved_us, end + moved_us, part, None)
        for part, intervals in clipped(parts, (step.begin_us, step.end_us)).items()
        for begin, end in intervals
    ]


def _rank_row(
    diagnosis: Diagnosis,
    measures: Measures,
    step: StepTime,
    marks: Sequence[LaneSpan],
    span_us: float,
) -> str:
    blamed = [f for f in diagnosis.findings[:1] if f.label == measures.label]
    note = f' <b class="problem">{safe(blamed[0].kind)}</b>' if blamed else ""
    name = f"{safe(measures.label)}{note} · {duration(step.duration_us)}"
    picture = _row(measures.label, marks, span_us)
    return f'<div class="lane{" blamed" if blamed else ""}"><span>{name}</span>{picture}</div>'
