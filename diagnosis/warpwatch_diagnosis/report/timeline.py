"""The longest step on a time axis: for one rank its lanes, for several a row for each as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from warpwatch_diagnosis.measures.intervals import within
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.measures.step_timeline import Lane, StepTimeline
from warpwatch_diagnosis.measures.steps import StepTime
from warpwatch_diagnosis.report.drawing import MAX_RECTANGLES, Mark, axis, legend, row, shares, thin
from warpwatch_diagnosis.report.parts import Capture, Parts, aligned_index, clipped
from warpwatch_diagnosis.report.words import LANES, duration, safe, stream_label
from warpwatch_diagnosis.verdict.conclusion import Diagnosis

MAX_RANKS = 32
_TOLD = 3


def timeline(capture: Capture, chosen: Measures) -> str:
    """HTML; empty where no step is annotated. ``chosen``: the rank whose lanes are drawn."""
    if not capture.several:
        return _lanes(capture, chosen, MAX_RECTANGLES)
    half = MAX_RECTANGLES // 2
    return _ranks(capture, chosen, half) + _lanes(capture, chosen, half)


def _lanes(capture: Capture, measures: Measures, budget: int) -> str:
    drawn = measures.timeline
    if drawn is None:
        return ""
    marks = [_marks(lane) for lane in drawn.lanes]
    if measures.gpu is None:
        # Nothing but the thread itself: what it does is all there is to see.
        step = max(measures.per_step, key=lambda s: (s.duration_us, -s.begin_us))
        marks = [_spans(capture.parts(measures), step, 0.0), *marks[1:]]
    limits = shares([len(found) for found in marks], budget)
    rows = "".join(
        _lane(lane, thin(found, limit), drawn)
        for lane, found, limit in zip(drawn.lanes, marks, limits, strict=True)
    )
    whose = f" of {measures.label}" if capture.several else ""
    labels = [mark.label for found in marks for mark in found]
    return (
        f"<h2>The longest step{safe(whose)}</h2>"
        f'<p class="soft">Step {drawn.number}, {duration(drawn.duration_us)}.</p>'
        f'<section class="card">{rows}{axis(drawn.duration_us)}{legend(labels)}</section>'
    )


def _marks(lane: Lane) -> list[Mark]:
    if lane.kind == "stream":
        return [Mark(s.begin_us, s.end_us, stream_label(s.label), s.name) for s in lane.spans]
    # Of the host and of idleness a collective is one that blocks the thread.
    renamed = {"communication": "blocked"}
    return [
        Mark(s.begin_us, s.end_us, renamed.get(s.label, s.label), s.name)
        for s in lane.spans
        if s.label in LANES
    ]


def _lane(lane: Lane, marks: Sequence[Mark], drawn: StepTimeline) -> str:
    title = _title(lane)
    picture = row(marks, drawn.duration_us, f"{title}: {_told(marks, drawn.duration_us)}")
    return f'<div class="lane"><span>{safe(title)}</span>{picture}</div>'


def _title(lane: Lane) -> str:
    if lane.kind == "host":
        return "CPU, training thread"
    if lane.kind == "idle":
        return "GPU idle, by cause"
    device, _, stream = lane.name.partition("/")
    return f"GPU {device}, stream {stream.removeprefix('stream ')}"


def _told(marks: Sequence[Mark], span_us: float) -> str:
    """What takes most of a row, for who cannot see it."""
    spent: dict[str, float] = {}
    for mark in marks:
        spent[mark.label] = spent.get(mark.label, 0.0) + mark.end_us - mark.begin_us
    most = sorted(spent, key=lambda label: -spent[label])[:_TOLD]
    told = [f"{LANES[label].lower()} {100 * spent[label] / span_us:.0f} %" for label in most]
    return ", ".join(told) if told and span_us > 0 else "nothing"


def _ranks(capture: Capture, chosen: Measures, budget: int) -> str:
    """One step on every rank that has it."""
    if not chosen.per_step:
        return ""
    number = _telling_step(capture, chosen)
    shown, rest = _having(capture, chosen, number)
    windows = [_window(capture.diagnosis, measures, step) for measures, step in shown]
    low = min(begin for begin, _ in windows)
    span_us = max(end for _, end in windows) - low
    drawn = [
        _spans(capture.parts(measures), step, begin - low)
        for (measures, step), (begin, _) in zip(shown, windows, strict=True)
    ]
    limits = shares([len(marks) for marks in drawn], budget)
    drawn = [thin(marks, limit) for marks, limit in zip(drawn, limits, strict=True)]
    rows = "".join(
        _rank_row(capture.diagnosis, measures, step, marks, span_us)
        for (measures, step), marks in zip(shown, drawn, strict=True)
    )
    more = f" {rest} more ranks are not shown." if rest else ""
    return (
        f"<h2>Step {number} on every rank</h2>"
        f'<p class="soft">One row a rank, {_clock(capture.diagnosis)}.{more}</p>'
        f'<section class="card">{rows}{axis(span_us)}'
        f"{legend(mark.label for marks in drawn for mark in marks)}</section>"
    )


def _having(
    capture: Capture, chosen: Measures, number: int
) -> tuple[list[tuple[Measures, StepTime]], int]:
    """At most MAX_RANKS ranks with their step of that number, the chosen one among them; and how
    many more there are."""
    having = [(m, s) for m in capture.ranks for s in m.per_step if s.number == number]
    first = sorted(range(len(having)), key=lambda n: having[n][0] is not chosen)[:MAX_RANKS]
    return [having[n] for n in sorted(first)], len(having) - len(first)


def _telling_step(capture: Capture, chosen: Measures) -> int:
    """Of the chosen rank's steps the one in which ranks wait most for each other, else the longest.

    A device that is behind its host does a step's communication in the window of the next one.
    """
    waited_us: Counter[int] = Counter()
    for measures in capture.ranks:
        waits = capture.parts(measures).get("rank_wait", [])
        spent = within(waits, measures.steps)
        for step, us in zip(measures.per_step, spent, strict=True):
            waited_us[step.number] += round(us)
    steps = chosen.per_step
    return max(steps, key=lambda s: (waited_us[s.number], s.duration_us, -s.number)).number


def _clock(diagnosis: Diagnosis) -> str:
    if diagnosis.alignment is None:
        return "each from its own begin of the step"
    return "clocks aligned at the ends of collectives"


def _window(diagnosis: Diagnosis, measures: Measures, step: StepTime) -> tuple[float, float]:
    """On the common clock; without one every step begins at 0."""
    index = aligned_index(diagnosis, measures)
    if diagnosis.alignment is None or index is None:
        return 0.0, step.duration_us
    offset_us = diagnosis.alignment.offsets_us[index]
    return step.begin_us - offset_us, step.end_us - offset_us


def _spans(parts: Parts, step: StepTime, at_us: float) -> list[Mark]:
    """What of the parts lies in the step, which begins at ``at_us`` of the drawing."""
    moved_us = at_us - step.begin_us
    return [
        Mark(begin + moved_us, end + moved_us, part)
        for part, intervals in clipped(parts, (step.begin_us, step.end_us)).items()
        for begin, end in intervals
    ]


def _rank_row(
    diagnosis: Diagnosis, measures: Measures, step: StepTime, marks: Sequence[Mark], span_us: float
) -> str:
    blamed = [f for f in diagnosis.findings[:1] if f.label == measures.label]
    note = f' <b class="problem">{safe(blamed[0].kind)}</b>' if blamed else ""
    name = f"{safe(measures.label)}{note} · {duration(step.duration_us)}"
    picture = row(marks, span_us, f"{measures.label}: {_told(marks, span_us)}")
    return f'<div class="lane{" blamed" if blamed else ""}"><span>{name}</span>{picture}</div>'
