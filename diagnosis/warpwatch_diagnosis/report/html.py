"""Renders the diagnosis as one page without network and script; text of traces is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.report import handover
from warpwatch_diagnosis.report.drawing import step_bars, time_bars
from warpwatch_diagnosis.report.parts import Breakdown
from warpwatch_diagnosis.report.tables import tables
from warpwatch_diagnosis.report.timeline import timeline
from warpwatch_diagnosis.report.words import duration, safe, sentence, title
from warpwatch_diagnosis.rules.base import Finding, percent
from warpwatch_diagnosis.verdict.conclusion import HEALTHY, INCONCLUSIVE, NO_PROBLEM, Diagnosis

_STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_MAX_CHANGES = 5
_NOTE = (
    "Shares are unions of intervals over the step window; the parts of a bar are disjoint and add "
    "up to it. A trace is recorded under the profiler, whose own cost lengthens gaps."
)


def render_html(diagnosis: Diagnosis) -> str:
    """Return a complete HTML document of at most 500 kB."""
    breakdown = Breakdown(diagnosis)
    chosen = breakdown.chosen
    head = title(diagnosis.verdict, diagnosis.measures)
    body = _verdict(diagnosis, chosen)
    if chosen is not None:
        body += timeline(breakdown, chosen) + time_bars(breakdown, chosen)
        body += step_bars(breakdown, chosen) + _others(diagnosis)
        body += _next(chosen) + tables(diagnosis, chosen)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{head} · Warpwatch diagnosis</title><style>{_STYLE}</style></head>
<body><main>
{body}
</main><footer class="soft">{_NOTE}</footer></body></html>
"""


def _verdict(diagnosis: Diagnosis, chosen: Measures | None) -> str:
    verdict = diagnosis.verdict
    tone = HEALTHY if verdict in NO_PROBLEM else "problem"
    if verdict == INCONCLUSIVE:
        tone = verdict
    first = diagnosis.findings[0] if diagnosis.findings else None
    why = _changes(diagnosis, chosen)
    if first is not None:
        gain = f'<p class="gain">{_gain(first, chosen)}{_price(first)}</p>'
        why = f"{_advice(first)}{gain}{_list(first.evidence[1:])}"
    lead = diagnosis.summary
    if diagnosis.decides:
        lead = lead.replace(f"; {diagnosis.decides}", "")
        why = _todo("What would decide", sentence(diagnosis.decides)) + (why if not first else "")
    return (
        f'<section class="verdict {tone}">'
        f"<h1>{title(verdict, diagnosis.measures)}</h1>"
        f'<p class="lead">{safe(sentence(lead))}</p>{why}'
        f'<p class="gain soft">Verdict: <code class="kind">{safe(verdict)}</code></p></section>'
    )


def _changes(diagnosis: Diagnosis, chosen: Measures | None) -> str:
    """Return the changes since the baseline, if no finding names them."""
    found = [c.sentences for c in diagnosis.comparison if chosen and c.label == chosen.label]
    return _list(found[0][1 : 1 + _MAX_CHANGES]) if found else ""


def _advice(finding: Finding) -> str:
    return _todo("What to change", finding.advice)


def _todo(head: str, text: str) -> str:
    return f'<div class="todo"><b>{head}</b><p>{safe(text)}</p></div>'


def _list(sentences: Sequence[str], css: str = ' class="why"') -> str:
    items = "".join(f"<li>{safe(sentence(text))}</li>" for text in sentences)
    return f"<ul{css}>{items}</ul>" if items else ""


def _gain(finding: Finding, measures: Measures | None) -> str:
    """Return the duration of a step, and its duration without the fault."""
    if measures is None or not measures.steps or finding.recoverable_s <= 0:
        return ""
    count = len(measures.steps)
    now_us = measures.window_us / count
    then_us = max(0.0, now_us - finding.recoverable_s * 1e6 / count)
    return (
        f'<strong class="big">{duration(now_us)} a step now, '
        f"about {duration(then_us)} without this</strong><br>"
    )


def _price(finding: Finding) -> str:
    return (
        f"{finding.recoverable_s:,.3f} s to win back · "
        f"{safe(percent(finding.share))} of the step · confidence {finding.confidence}"
    )


def _others(diagnosis: Diagnosis) -> str:
    """Return the findings after the first, or all if none heads the report."""
    rest = diagnosis.findings[not diagnosis.decides :]
    cards = "".join(_card(f, title(f.kind, diagnosis.measures)) for f in rest)
    return f"<h2>Then</h2>{cards}" if cards else ""


def _next(measures: Measures) -> str:
    """Return the next tool's command lines, to be copied; the page has no links."""
    rows = "".join(
        f'<p class="soft">{safe(title)}</p>'
        + (
            f"<pre>{safe(text)}</pre>"
            if text.startswith(handover.WHOLE)
            else f"<p>{safe(text)}</p>"
        )
        for title, text in handover.commands(measures)
    )
    return f'<h2>Look closer</h2><section class="card">{rows}</section>' if rows else ""


def _card(finding: Finding, name: str) -> str:
    return (
        f'<section class="card"><h3>{name}</h3>'
        f'<p class="soft"><code>{safe(finding.kind)}</code> · {safe(finding.label)} · '
        f"{_price(finding)}</p>{_list(finding.evidence, css='')}{_advice(finding)}</section>"
    )
