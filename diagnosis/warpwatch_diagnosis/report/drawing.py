"""Splits a stretch of time into disjoint parts, and draws them and the longest step as SVG."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from warpwatch_diagnosis.before_after import cpu_phases
from warpwatch_diagnosis.diagnosis import Diagnosis
from warpwatch_diagnosis.intervals import (
    Interval,
    Intervals,
    clip,
    difference,
    intersection,
    total,
    union,
    within,
)
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.host_events import CAUSES
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.measures.steps import Lane, LaneSpan, StepTime, merged
from warpwatch_diagnosis.words import LANES, PARTS, duration, origin, safe, stream_label

TimeParts = Mapping[str, Intervals]


class Breakdown:
    """The parts of each rank of a diagnosis, split once.

    chosen: the rank that the verdict names, else the rank with the longest window, else None.
    """

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis
        self.ranks = diagnosis.measures
        blamed = [f.label for f in diagnosis.findings[:1]]
        named = [m for m in self.ranks if m.label in blamed]
        self.chosen = next(iter(named), max(self.ranks, key=lambda m: m.window_us, default=None))
        self._parts: dict[int, TimeParts] = {}

    @property
    def several(self) -> bool:
        return len(self.ranks) > 1

    def parts(self, measures: Measures) -> TimeParts:
        """Return the parts that are not empty, in the order of PARTS."""
        if id(measures) not in self._parts:
            gpu, alignment = measures.gpu, self.diagnosis.alignment
            waits = alignment.waits(measures) if alignment else []
            found = _gpu_parts(gpu, waits) if gpu else _cpu_parts(measures)
            self._parts[id(measures)] = {part: found[part] for part in PARTS if found.get(part)}
        return self._parts[id(measures)]


def _gpu_parts(gpu: GpuTime, waits: Intervals) -> dict[str, Intervals]:
    exposed = gpu.exposed_communication
    waiting = intersection(exposed, waits)
    busy = {
        "compute": gpu.compute,
        "communication": difference(exposed, waiting),
        "rank_wait": waiting,
        "copies": gpu.exposed_copies,
    }
    idle: dict[str, Intervals] = {cause: gpu.idle_time.of(cause) for cause in CAUSES}
    # A busy GPU has the part "communication"; here the host waits in a collective while it is idle.
    idle["blocked"] = idle.pop("communication")
    return busy | idle


def _cpu_parts(measures: Measures) -> dict[str, Intervals]:
    found = cpu_phases(measures)
    if measures.cpu is not None:
        saving = measures.cpu.saving
        found["rank_wait"] = found.pop("collective_wait")
        found["checkpoint"] = union(found["checkpoint"] + saving)
        found["host"] = difference(found["host"], saving)
    return found


def clipped(parts: TimeParts, window: Interval) -> TimeParts:
    found = {part: clip(intervals, window) for part, intervals in parts.items()}
    return {part: intervals for part, intervals in found.items() if intervals}


def sums_us(parts: TimeParts) -> dict[str, float]:
    return {part: total(intervals) for part, intervals in parts.items()}


# The units of the drawing, which the page stretches to its width.
_UNITS = 1_000.0
# A screen has no more pixels, and the drawing stays below 100 kB for any trace.
MAX_RECTANGLES = 2_000
# Named rectangles show a title when pointed at; more of them would make the file large.
_NAMED = 25
_MIN_NAMED_WIDTH = 3.0


def fitting(rows: Iterable[Iterable[LaneSpan]], budget: int) -> list[list[LaneSpan]]:
    """Merge close marks of the longest row until all rows together have at most ``budget``."""
    found = [sorted(marks, key=lambda m: (m.begin_us, m.end_us)) for marks in rows]
    last_us = max((mark.end_us for marks in found for mark in marks), default=0.0)
    near_us = [max(1e-3, last_us / (2 * budget))] * len(found)
    while sum(map(len, found)) > budget:
        row = max(range(len(found)), key=lambda row: len(found[row]))
        found[row] = merged(found[row], near_us[row])
        near_us[row] *= 1.5
    return found


def draw_row(marks: Sequence[LaneSpan], span_us: float, title: str, height: int = 10) -> str:
    """Return one SVG; ``title`` describes it in words, ``span_us`` is the time of its width."""
    scale = _UNITS / span_us if span_us > 0 else 0.0
    widths = [(mark.end_us - mark.begin_us) * scale for mark in marks]
    longest = sorted(range(len(marks)), key=lambda n: -widths[n])[:_NAMED]
    named = {n for n in longest if widths[n] >= _MIN_NAMED_WIDTH}
    paths: dict[str, list[str]] = defaultdict(list)
    rectangles = []
    for n, mark in enumerate(marks):
        x, width = mark.begin_us * scale, max(0.3, widths[n])
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
MIN_SHOWN_SHARE = 0.0005
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
        if spent[part] / window_us >= MIN_SHOWN_SHARE
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
    picture = draw_row(marks, span_us, f"{title}: {words}")
    return f'<div class="lane"><span>{safe(title)}</span>{picture}</div>'


def step_bars(breakdown: Breakdown, chosen: Measures) -> str:
    """Draw each step of the chosen rank; of many steps the longest, in order."""
    times = chosen.per_step
    if len(times) < 2:
        return ""
    longest = sorted(range(len(times)), key=lambda n: -times[n].duration_us)[:MAX_STEPS]
    drawn = sorted(longest)
    parts = breakdown.parts(chosen)
    spent = [sums_us(clipped(parts, chosen.steps[n])) for n in drawn]
    titles = [f"Step {times[n].number} · {duration(times[n].duration_us)}" for n in drawn]
    span_us = max(times[n].duration_us for n in drawn)
    which = "" if len(drawn) == len(times) else f" (the longest {MAX_STEPS} of {len(times)})"
    whose = f" of {chosen.label}" if breakdown.several else ""
    return (
        f"<h2>Step by step{safe(whose)}{which}</h2>"
        f'<section class="card">{_stacks(titles, spent, span_us)}</section>'
    )


# The ranks with a row for the same step.
MAX_LANES = 32
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
        for title, found in zip(titles, fitting(marks, budget), strict=True)
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
    return draw_row(marks, span_us, f"{title}: {', '.join(words) or 'nothing'}")


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
    drawn = fitting(marks, budget)
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
    offset_us = diagnosis.alignment.offset_us(measures) if diagnosis.alignment else None
    origin_us = step.begin_us if offset_us is None else offset_us
    return step.begin_us - origin_us, step.end_us - origin_us


def _ranks_with_step(
    breakdown: Breakdown, chosen: Measures, number: int
) -> tuple[list[tuple[Measures, StepTime]], int]:
    """Return up to MAX_LANES ranks and steps, including the chosen one, and the number left out."""
    having = [(m, s) for m in breakdown.ranks for s in m.per_step if s.number == number]
    first = sorted(range(len(having)), key=lambda n: having[n][0] is not chosen)[:MAX_LANES]
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
