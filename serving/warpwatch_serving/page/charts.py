"""The numbers of inline SVG: step times, phases, and the minutes around an anomaly."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from warpwatch_runtime.quantities import gibibytes, percent, rate, seconds, text
from warpwatch_telemetry.anomalies import Anomaly, AnomalyContext, ContextSeries

WIDTH = 300
HEIGHT = 64
MAX_STEPS = 240
# Steps far above the usual are cut off at the chart's top, or the usual would be a flat line.
OUTLIER_FACTOR = 2.5

# In the order in which the legend and the bars have them; the number is the colour's.
PHASES = ("data_wait", "h2d", "forward", "backward", "comm", "optimizer", "checkpoint", "eval")
MAX_OWN_PHASES = 3
OTHER = "other"


@dataclass(frozen=True, slots=True)
class StepChart:
    """A chart of steps: ``line`` and ``area`` are SVG point lists, the rest are coordinates."""

    line: str
    area: str
    median_y: float
    marks_x: tuple[float, ...]
    label: str


def ceiling_s(series: Sequence[Sequence[float]]) -> float:
    """Return the top of charts that are compared with each other, in seconds."""
    values = sorted(value for one in series for value in one if math.isfinite(value))
    if not values:
        return 1.0
    usual = values[int(0.9 * (len(values) - 1))]
    return max(1e-9, min(values[-1], usual * OUTLIER_FACTOR) * 1.12)


def step_chart(
    durations_s: Sequence[float], top_s: float, *, newest_step: int | None, marks: Sequence[int]
) -> StepChart | None:
    """Return the chart with ``marks`` at steps, None if there are too few steps for a line."""
    shown = [value for value in durations_s if math.isfinite(value)][-MAX_STEPS:]
    if len(shown) < 2:
        return None
    pace = WIDTH / (len(shown) - 1)
    points = [(index * pace, _y(value, top_s)) for index, value in enumerate(shown)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    first = None if newest_step is None else newest_step - len(shown) + 1
    inside = [mark - first for mark in marks if first is not None and 0 < mark - first < len(shown)]
    return StepChart(
        line=line,
        area=f"0,{HEIGHT} {line} {WIDTH},{HEIGHT}",
        median_y=round(_y(statistics.median(shown), top_s), 1),
        marks_x=tuple(round(index * pace, 1) for index in inside),
        label=f"step times: the newest {seconds(shown[-1])}, the median "
        f"{seconds(statistics.median(shown))}, between {seconds(min(shown))} and "
        f"{seconds(max(shown))} in {len(shown)} steps",
    )


def _y(value: float, top_s: float) -> float:
    return HEIGHT * (1 - min(1.0, max(0.0, value / top_s)))


@dataclass(frozen=True, slots=True)
class PhaseShare:
    """A part of a bar: start and width in per cent; ``colour`` is the number of a CSS class."""

    name: str
    colour: int
    start: float
    width: float
    share: str


def phase_shares(phases_s: Mapping[str, float], total_s: float) -> tuple[PhaseShare, ...]:
    """Return shares of the time in steps; the remainder and many own phases are ``other``."""
    known = {name: value for name, value in phases_s.items() if math.isfinite(value) and value > 0}
    own = sorted(known.keys() - {*PHASES, OTHER}, key=lambda name: (-known[name], name))
    names = [name for name in PHASES if name in known] + own[:MAX_OWN_PHASES]
    total_s = max(total_s, sum(known.values()))
    if not math.isfinite(total_s) or total_s <= 0:
        return ()
    shares = []
    start = 0.0
    for name in names:
        shares.append(_share(name, _colour(name, own), start, known[name] / total_s))
        start += known[name] / total_s * 100
    if start < 99.5:
        shares.append(_share(OTHER, len(PHASES) + MAX_OWN_PHASES, start, 1 - start / 100))
    return tuple(shares)


def phases_label(shares: Sequence[PhaseShare]) -> str:
    return "phases: " + ", ".join(f"{share.name} {share.share}" for share in shares)


def _share(name: str, colour: int, start: float, ratio: float) -> PhaseShare:
    return PhaseShare(
        text(name, 24), colour, round(start, 2), round(ratio * 100, 2), percent(ratio)
    )


def _colour(name: str, own: Sequence[str]) -> int:
    return PHASES.index(name) if name in PHASES else len(PHASES) + own.index(name)


PLOT_WIDTH = 240
PLOT_HEIGHT = 48
MAX_PLOTS = 4
# A drawing of one point says nothing.
MIN_POINTS = 2

# The part of a step that does not wait for other ranks: it shows whose work takes long.
LOCAL = "local"
COMM = "phase_s{phase=comm}"
STEP = "step_duration_s"
CLOCK = "clock_hertz{domain=sm}"
TEMPERATURE = "temperature_celsius{sensor=gpu}"

Show = Callable[[float], str]
# Times and finite values of one quantity.
Points = list[tuple[float, float]]
_QUANTITIES: dict[str, tuple[str, Show]] = {
    STEP: ("step time", seconds),
    LOCAL: ("own work", seconds),
    COMM: ("waiting for ranks", seconds),
    "phase_s{phase=data_wait}": ("waiting for data", seconds),
    "tokens_per_s": ("throughput", lambda value: rate(value, "tokens")),
    "samples_per_s": ("throughput", lambda value: rate(value, "samples")),
    "memory_allocated_bytes": ("memory of the rank", gibibytes),
    "memory_used_bytes": ("memory of the GPU", gibibytes),
    "power_watts": ("power", lambda value: f"{value:.0f} W"),
    TEMPERATURE: ("temperature", lambda value: f"{value:.0f} °C"),
    CLOCK: ("SM clock", lambda value: f"{value / 1e6:.0f} MHz"),
    "utilization_ratio": ("utilisation", percent),
}
# The series of the job as a whole.
_OF_JOB = ("tokens_per_s", "samples_per_s")
_USUAL = (STEP, "tokens_per_s", "samples_per_s", CLOCK, "power_watts", "utilization_ratio")
_MEMORY = ("memory_allocated_bytes", "memory_used_bytes", STEP)
# The series that a kind changes come first; unknown ones are ignored.
_FIRST: dict[str, tuple[str, ...]] = {
    "straggler": (LOCAL,),
    "data_stall": ("phase_s{phase=data_wait}",),
    "comm_slow": (COMM,),
    "memory_leak": _MEMORY,
    "memory_pressure": _MEMORY,
    "oom": _MEMORY,
    "thermal_throttle": (TEMPERATURE, CLOCK),
    "overheating": (TEMPERATURE, CLOCK),
    "power_brake": (CLOCK, "power_watts"),
    "clock_drop": (CLOCK, "power_watts"),
    "device_idle": ("utilization_ratio", "power_watts"),
}


@dataclass(frozen=True, slots=True)
class PlotView:
    """A plot: ``lines`` (rank) and ``peers`` (job) are SVG point lists; ``begin_x``: its start.

    ``since`` is empty where nothing came after the begin.
    """

    title: str
    before: str
    since: str
    lines: tuple[str, ...]
    peers: tuple[str, ...]
    begin_x: float
    label: str


def plots(anomaly: Anomaly, context: AnomalyContext | None) -> tuple[PlotView, ...]:
    """Return at most MAX_PLOTS, first those that the kind changes; empty without data."""
    if context is None:
        return ()
    times = [time for series in context.series for time in series.times]
    if not times:
        return ()
    first, last = min(times), max(times) + context.interval_s
    names = dict.fromkeys((*_FIRST.get(anomaly.kind, ()), *_USUAL))
    drawn = (_plot(name, anomaly, context, first, last) for name in names)
    return tuple(plot for plot in drawn if plot is not None)[:MAX_PLOTS]


def _plot(
    name: str, anomaly: Anomaly, context: AnomalyContext, first: float, last: float
) -> PlotView | None:
    known = list(_known(name, context))
    if not known:
        return None
    points, peers = known[0], known[1] if len(known) > 1 else []
    top = max(value for _, value in points + peers) * 1.12 or 1.0
    scale = _Scale(first, last, top, context.interval_s)
    title, show = _QUANTITIES[name]
    # The point in which it began is neither before nor since.
    before = [v for t, v in points if t + context.interval_s <= anomaly.time]
    since = [v for t, v in points if t >= anomaly.time]
    medians = [show(statistics.median(part)) if part else "" for part in (before, since)]
    label = ", ".join(
        f"{when} {value}" for when, value in zip(("before", "since"), medians, strict=True) if value
    )
    return PlotView(
        title=title,
        before=medians[0],
        since=medians[1],
        lines=tuple(scale.lines(points)),
        peers=tuple(scale.lines(peers)),
        begin_x=scale.x(anomaly.time),
        label=f"{title}: {label}" if label else title,
    )


def _known(name: str, context: AnomalyContext) -> Iterator[Points]:
    """Yield the points of the rank and then of its job, or of the job or device alone."""
    for series in sorted(context.series, key=lambda one: one.rank is None):
        if name in _OF_JOB and series.rank is not None:
            continue
        values = _local(series) if name == LOCAL else series.values.get(name, ())
        points = [
            (time, value)
            for time, value in zip(series.times, values, strict=False)
            if value is not None and math.isfinite(value)
        ]
        if len(points) >= MIN_POINTS:
            yield points


def _local(series: ContextSeries) -> Sequence[float | None]:
    steps, comms = series.values.get(STEP, ()), series.values.get(COMM, ())
    return [
        None if step is None or comm is None else max(0.0, step - comm)
        for step, comm in zip(steps, comms, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class _Scale:
    """From times and values to the drawing; points lie in the middle of their interval."""

    first: float
    last: float
    top: float
    interval_s: float

    def x(self, time: float) -> float:
        return round(
            PLOT_WIDTH * min(1.0, max(0.0, (time - self.first) / (self.last - self.first))), 1
        )

    def lines(self, points: Points) -> Iterator[str]:
        """Yield a line for each stretch without a gap."""
        stretch: list[str] = []
        before = -math.inf
        for time, value in points:
            if time - before > 1.5 * self.interval_s:
                if len(stretch) > 1:
                    yield " ".join(stretch)
                stretch = []
            y = PLOT_HEIGHT * (1 - min(1.0, max(0.0, value / self.top)))
            stretch.append(f"{self.x(time + self.interval_s / 2):g},{y:.1f}")
            before = time
        if len(stretch) > 1:
            yield " ".join(stretch)
