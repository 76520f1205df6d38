"""The numbers of inline SVG: step times as a line, phases as a stacked bar."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from warpwatch_runtime.quantities import percent, seconds, text

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
    """``line`` and ``area`` are SVG point lists; ``median_y`` and ``marks_x`` are coordinates."""

    line: str
    area: str
    median_y: float
    marks_x: tuple[float, ...]
    label: str


def ceiling_s(series: Sequence[Sequence[float]]) -> float:
    """The top of charts that are compared with each other, in seconds."""
    values = sorted(value for one in series for value in one if math.isfinite(value))
    if not values:
        return 1.0
    usual = values[int(0.9 * (len(values) - 1))]
    return max(1e-9, min(values[-1], usual * OUTLIER_FACTOR) * 1.12)


def step_chart(
    durations_s: Sequence[float], top_s: float, *, newest_step: int | None, marks: Sequence[int]
) -> StepChart | None:
    """``marks``: steps to point at. None when there are too few steps for a line."""
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
    """``start`` and ``width`` in per cent of the bar; ``colour`` is the number of a CSS class."""

    name: str
    colour: int
    start: float
    width: float
    share: str


def phase_shares(phases_s: Mapping[str, float], total_s: float) -> tuple[PhaseShare, ...]:
    """Shares of the time in steps, the remainder as ``other``; many own phases are other too."""
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
