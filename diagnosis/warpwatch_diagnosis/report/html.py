"""The diagnosis as one page: no network, no script; everything from the trace is escaped."""

from __future__ import annotations

from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.report import bars
from warpwatch_diagnosis.report.parts import Capture
from warpwatch_diagnosis.report.style import STYLE
from warpwatch_diagnosis.report.tables import tables
from warpwatch_diagnosis.report.timeline import timeline
from warpwatch_diagnosis.report.words import duration, safe, sentence, verdict_title
from warpwatch_diagnosis.rules.base import Finding, percent
from warpwatch_diagnosis.verdict.conclusion import HEALTHY, INCONCLUSIVE, Diagnosis

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_TOLD_CHANGES = 6
_NOTE = (
    "Shares are unions of intervals over the step window; the parts of a bar are disjoint and add "
    "up to it. A trace is recorded under the profiler, whose own cost lengthens gaps."
)


def render_html(diagnosis: Diagnosis) -> str:
    """A complete HTML document of at most 500 kB, whatever the traces hold."""
    verdict = diagnosis.verdict
    capture = Capture(diagnosis)
    chosen = capture.chosen
    body = _verdict(diagnosis, chosen)
    if chosen is not None:
        body += timeline(capture, chosen) + bars.shares(capture, chosen)
        body += bars.steps(capture, chosen) + _others(diagnosis) + tables(diagnosis, chosen)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{safe(verdict_title(verdict))} · Warpwatch diagnosis</title><style>{STYLE}</style></head>
<body><main>
{body}
</main><footer class="soft">{_NOTE}</footer></body></html>
"""


def _verdict(diagnosis: Diagnosis, chosen: Measures | None) -> str:
    verdict = diagnosis.verdict
    tone = verdict if verdict in (HEALTHY, INCONCLUSIVE) else "problem"
    told = "".join(_advice(finding, chosen) for finding in diagnosis.findings[:1])
    told = told or _changes(diagnosis, chosen)
    return (
        f'<section class="verdict {tone}">'
        f"<h1>{safe(verdict_title(verdict))}</h1>"
        f'<p class="lead">{safe(sentence(diagnosis.summary))}</p>{told}'
        f'<p class="gain soft">Verdict: <code class="kind">{safe(verdict)}</code></p></section>'
    )


def _changes(diagnosis: Diagnosis, chosen: Measures | None) -> str:
    """What differs from the baseline, where no finding says it."""
    found = [c.sentences for c in diagnosis.comparison if chosen and c.label == chosen.label]
    items = [f"<li>{safe(sentence(s))}</li>" for s in found[0][1:_TOLD_CHANGES]] if found else []
    return f'<ul class="why">{"".join(items)}</ul>' if items else ""


def _advice(finding: Finding, chosen: Measures | None) -> str:
    why = "".join(f"<li>{safe(sentence(e))}</li>" for e in finding.evidence[1:])
    evidence = f'<ul class="why">{why}</ul>' if why else ""
    return (
        f'<div class="todo"><b>What to change</b><p>{safe(finding.advice)}</p></div>'
        f'<p class="gain">{_gain(finding, chosen)}{_price(finding)}</p>{evidence}'
    )


def _gain(finding: Finding, measures: Measures | None) -> str:
    """What the step takes, and what it would take without the fault."""
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
    """Findings after the first."""
    cards = "".join(_card(finding) for finding in diagnosis.findings[1:])
    return f"<h2>Then</h2>{cards}" if cards else ""


def _card(finding: Finding) -> str:
    evidence = "".join(f"<li>{safe(sentence(e))}</li>" for e in finding.evidence)
    return (
        f'<section class="card"><h3>{safe(verdict_title(finding.kind))}</h3>'
        f'<p class="soft"><code>{safe(finding.kind)}</code> · {safe(finding.label)} · '
        f"{_price(finding)}</p><ul>{evidence}</ul>"
        f'<div class="todo"><b>What to change</b><p>{safe(finding.advice)}</p></div></section>'
    )
