"""Bars: where the window went on each rank, and each step of the chosen one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.report.drawing import Mark, legend, row
from warpwatch_diagnosis.report.parts import Capture, Parts, steps_us, sums_us
from warpwatch_diagnosis.report.words import PARTS, duration, origin, safe

# More than any capture of the daemon holds, and still to be overlooked.
MAX_STEPS = 24
MAX_RANKS = 64
# Less would read as 0.0 %.
MIN_SHARE = 0.0005
# Of the longest bar: about two pixels.
MIN_SEEN = 0.002


def shares(capture: Capture, chosen: Measures) -> str:
    """The chosen rank part by part; of several ranks each as one bar as well."""
    parts = capture.parts(chosen)
    if not parts:
        return ""
    whose = f" on {chosen.label}" if capture.several else ""
    return (
        f"<h2>Where the time goes{safe(whose)}</h2>"
        f'<section class="card"><p class="soft">{safe(origin(chosen))}</p>'
        f"{_by_part(parts, chosen)}</section>{_all_ranks(capture) if capture.several else ''}"
    )


def _by_part(parts: Parts, measures: Measures) -> str:
    """Largest first; the parts add up to the window."""
    spent = sums_us(parts)
    per = max(1, len(measures.steps))
    window_us = measures.window_us or 1.0
    lines = []
    for part in sorted(spent, key=lambda part: -spent[part]):
        share = spent[part] / window_us
        if share < MIN_SHARE:
            continue
        lines.append(
            f'<div class="bar-row"><span>{safe(PARTS[part])}</span><span class="bar">'
            f'<i class="b-{part}" style="width:{100 * min(1.0, share):.1f}%"></i></span>'
            f"<b>{100 * share:.1f} %</b><em>{duration(spent[part] / per)}</em></div>"
        )
    each = "a step" if measures.steps else "in all"
    head = f'<div class="bar-row head"><span></span><span></span><b>share</b><em>{each}</em></div>'
    return head + "".join(lines)


def _all_ranks(capture: Capture) -> str:
    shown = capture.ranks[:MAX_RANKS]
    stacks = [(m, sums_us(capture.parts(m))) for m in shown]
    longest = max((m.window_us for m in shown), default=0.0)
    rows = "".join(
        _stack(f"{m.label} · {duration(m.window_us)}", spent, longest) for m, spent in stacks
    )
    rest = len(capture.ranks) - len(shown)
    more = f'<p class="soft">{rest} more ranks are not shown.</p>' if rest else ""
    return (
        f'<h2>Where the time goes on every rank</h2><section class="card">{rows}'
        f"{_legend([spent for _, spent in stacks], longest)}{more}</section>"
    )


def _stack(title: str, spent: Mapping[str, float], span_us: float) -> str:
    """One bar of parts behind each other."""
    marks = []
    reached_us = 0.0
    for part, us in spent.items():
        marks.append(Mark(reached_us, reached_us + us, part))
        reached_us += us
    told = ", ".join(f"{PARTS[part].lower()} {duration(us)}" for part, us in _largest(spent))
    picture = row(marks, span_us, f"{title}: {told}")
    return f'<div class="lane"><span>{safe(title)}</span>{picture}</div>'


def _legend(stacks: Sequence[Mapping[str, float]], span_us: float) -> str:
    """Without what is too thin to be seen in any bar."""
    least_us = MIN_SEEN * span_us
    return legend(part for spent in stacks for part, us in spent.items() if us >= least_us)


def _largest(spent: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    return sorted(spent.items(), key=lambda item: -item[1])[:3]


def steps(capture: Capture, chosen: Measures) -> str:
    """Each step of the chosen rank; of many the longest, in their order."""
    if len(chosen.per_step) < 2:
        return ""
    known: Sequence[int] = range(len(chosen.per_step))
    longest = sorted(known, key=lambda n: -chosen.per_step[n].duration_us)[:MAX_STEPS]
    drawn = sorted(longest)
    spent = steps_us(capture.parts(chosen), [chosen.steps[n] for n in drawn])
    span_us = max(chosen.per_step[n].duration_us for n in drawn)
    rows = "".join(
        _stack(_step_title(chosen, n), parts, span_us)
        for n, parts in zip(drawn, spent, strict=True)
    )
    which = "" if len(drawn) == len(known) else f" (the longest {MAX_STEPS} of {len(known)})"
    whose = f" of {chosen.label}" if capture.several else ""
    return (
        f"<h2>Step by step{safe(whose)}{which}</h2>"
        f'<section class="card">{rows}{_legend(spent, span_us)}</section>'
    )


def _step_title(measures: Measures, index: int) -> str:
    step = measures.per_step[index]
    return f"Step {step.number} · {duration(step.duration_us)}"
