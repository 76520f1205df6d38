"""Renders the diagnosis for a terminal: the verdict, evidence, advice, and the numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from warpwatch_diagnosis.diagnosis import Diagnosis
from warpwatch_diagnosis.measures.measures import Measures, cpu_ratios, gpu_ratios
from warpwatch_diagnosis.report import handover
from warpwatch_diagnosis.report.drawing import (
    MAX_RANKS,
    MIN_SHOWN_SHARE,
    Breakdown,
    largest_parts,
    sums_us,
)
from warpwatch_diagnosis.rules.base import Finding
from warpwatch_diagnosis.words import COLUMN_HEADS, PARTS, duration, origin, percent, printable

COLUMNS = 100
_BAR = 40
_MAX_PARTS = 7
_MAX_LABEL = 16
TITLES = {
    "gpu_busy_ratio": "GPU busy",
    "idle_ratio": "GPU idle",
    "compute_ratio": "compute",
    "communication_ratio": "communication",
    "exposed_communication_ratio": "exposed communication",
    "overlap_ratio": "communication overlapped",
    "memory_copy_ratio": "memory copies",
    "data_loading_ratio": "data loading",
    "operator_ratio": "operators",
    "dispatch_ratio": "short operators",
    "collective_wait_ratio": "waiting in collectives",
    "host_ratio": "host's own work",
}


def render_text(diagnosis: Diagnosis) -> str:
    """Return lines of at most 100 columns; names without a blank are not broken."""
    lines = [*_wrapped(f"{diagnosis.verdict}: {diagnosis.summary}", "   "), ""]
    for number, finding in enumerate(diagnosis.findings, 1):
        # The summary is the first sentence of the first finding.
        evidence = finding.evidence[1:] if number == 1 else finding.evidence
        lines += [*_finding(number, finding, evidence), ""]
    breakdown = Breakdown(diagnosis)
    lines += _against_baseline(breakdown)
    if breakdown.several:
        lines += [*_ranks(breakdown), ""]
    if breakdown.chosen is not None:
        lines += _numbers(breakdown, breakdown.chosen)
        lines += [*_next(breakdown.chosen)]
    return "\n".join(lines).rstrip() + "\n"


def _next(measures: Measures) -> Iterator[str]:
    """Yield commands and links, which are not broken, so that they can be copied."""
    for title, text in handover.lines(measures):
        yield ""
        yield from _wrapped(f"   {title}:", "   ")
        whole = text.startswith(handover.WHOLE)
        yield from [f"   {printable(text)}"] if whole else _wrapped(f"   {text}", "   ")


def _finding(number: int, finding: Finding, evidence: Sequence[str]) -> list[str]:
    head = f"{number}. {finding.kind}, {finding.label}: {percent(finding.share)} of the step"
    price = f"{finding.recoverable_s:.3f} s to win back, confidence {finding.confidence}"
    lines = _wrapped(f"{head}, {price}", "   ")
    for sentence in evidence:
        lines += _wrapped(f"   - {sentence}", "     ")
    return lines + _wrapped(f"   Advice: {finding.advice}", "     ")


def _against_baseline(breakdown: Breakdown) -> list[str]:
    """Return the comparison of the chosen rank; the others are in the JSON."""
    label = breakdown.chosen.label if breakdown.chosen is not None else None
    for comparison in breakdown.diagnosis.comparison:
        if comparison.label == label:
            sentences = [_wrapped(f"   - {s}", "     ") for s in comparison.sentences]
            return ["Against the baseline:", *(line for lines in sentences for line in lines), ""]
    return []


def _wrapped(text: str, indent: str) -> list[str]:
    """Wrap text without a break between a number and its percent sign."""
    joined = printable(text).replace(" %", "\N{NO-BREAK SPACE}%")
    lines = textwrap.wrap(joined, COLUMNS, subsequent_indent=indent, break_long_words=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _numbers(breakdown: Breakdown, measures: Measures) -> list[str]:
    """Return the trace, its window as parts that add up to it, and the ratios."""
    lines = [origin(measures)]
    parts = breakdown.parts(measures)
    if parts:
        each = "a step" if measures.steps else "in all"
        lines.append(f"   {'where the time goes':<26}{'share':>7}{each:>11}")
        lines += [
            f"   {PARTS[part]:<26}{100 * share:5.1f} %{duration(us):>11}  "
            f"{'█' * round(_BAR * min(1.0, share))}".rstrip()
            for part, share, us in largest_parts(parts, measures)
        ]
    ratios = gpu_ratios(measures) | (cpu_ratios(measures) or {})
    known = [(title, ratios.get(key)) for key, title in TITLES.items()]
    named = [f"{title} {100 * value:.1f} %" for title, value in known if value is not None]
    return [*lines, "", *_wrapped(f"   {', '.join(named)}", "   ")]


def _ranks(breakdown: Breakdown) -> list[str]:
    """Return one row per rank with the parts that take most on any of them."""
    shown = breakdown.ranks[:MAX_RANKS]
    rows = []
    for measures in shown:
        spent = sums_us(breakdown.parts(measures))
        rows.append({part: us / (measures.window_us or 1.0) for part, us in spent.items()})
    columns = _columns(rows)
    heads = "".join(f"{COLUMN_HEADS[part]:>10}" for part in columns)
    lines = [f"   {'share of time':<{_MAX_LABEL}}{'a step':>9}{heads}"]
    for measures, shares in zip(shown, rows, strict=True):
        step_us = measures.window_us / measures.step_count
        cells = "".join(f"{100 * shares.get(part, 0.0):8.1f} %" for part in columns)
        label = printable(measures.label)[: _MAX_LABEL - 1]
        lines.append(f"   {label:<{_MAX_LABEL}}{duration(step_us):>9}{cells}")
    rest = len(breakdown.ranks) - len(shown)
    return lines + ([f"   and {rest} more"] if rest else [])


def _columns(rows: Sequence[Mapping[str, float]]) -> list[str]:
    most = {part: max(shares.get(part, 0.0) for shares in rows) for part in PARTS}
    largest = sorted(most, key=lambda part: -most[part])[:_MAX_PARTS]
    return [part for part in PARTS if part in largest and most[part] >= MIN_SHOWN_SHARE]
