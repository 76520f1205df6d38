"""The diagnosis as one page: no network, no script; everything from the trace is escaped."""

from __future__ import annotations

from html import escape

from warpwatch.diagnosis.diagnosis import Diagnosis
from warpwatch.diagnosis.measures import Measures
from warpwatch.diagnosis.rules.base import Finding, percent
from warpwatch.diagnosis.text import origin, ratios

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #fff; --card: #f6f8fa;
  --line: #d0d7de; --bar: #0969da; --good: #1a7f37; --bad: #b42318; --open: #8a5a00 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9da7b3; --paper: #0d1117;
  --card: #161b22; --line: #30363d; --bar: #58a6ff; --good: #4ac26b; --bad: #ff8a80;
  --open: #e3b341 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { margin: 0; font-size: 1.6rem } h2 { margin: 2rem 0 .5rem; font-size: 1.1rem }
h3 { margin: 0 0 .25rem; font-size: 1rem } p { margin: .5rem 0 } ul { margin: .5rem 0 }
.healthy { color: var(--good) } .inconclusive { color: var(--open) } .problem { color: var(--bad) }
.soft { color: var(--soft); font-size: .9rem }
section.card { margin: .75rem 0; padding: 1rem; background: var(--card);
  border: 1px solid var(--line); border-radius: .5rem }
.row { display: grid; grid-template-columns: minmax(8rem, 14rem) 1fr 4rem; gap: .5rem;
  align-items: center; margin: .2rem 0; font-size: .9rem }
.bar { height: .6rem; background: var(--line); border-radius: .3rem; overflow: hidden }
.bar i { display: block; height: 100%; background: var(--bar) }
.row b { text-align: right; font-weight: 500; font-variant-numeric: tabular-nums }
@media (max-width: 30rem) { .row { grid-template-columns: 1fr 4rem } .bar { grid-column: 1 / -1;
  grid-row: 2 } }
"""


def render_html(diagnosis: Diagnosis) -> str:
    """A complete HTML document."""
    verdict = diagnosis.verdict
    tone = verdict if verdict in ("healthy", "inconclusive") else "problem"
    findings = "".join(_finding(f) for f in diagnosis.findings)
    traces = "".join(_trace(m) for m in diagnosis.measures)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(verdict)} · Warpwatch diagnosis</title><style>{_STYLE}</style></head>
<body><main>
<h1 class="{tone}">{escape(verdict)}</h1>
<p>{escape(_sentence(diagnosis.summary))}</p>
{f"<h2>Why, and what to do</h2>{findings}" if findings else ""}
<h2>Where the time went</h2>
<p class="soft">Shares of the step window, by union of intervals; they overlap and need not add
up.</p>
{traces}
</main></body></html>
"""


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _finding(finding: Finding) -> str:
    evidence = "".join(f"<li>{escape(_sentence(e))}</li>" for e in finding.evidence)
    return (
        f'<section class="card"><h3>{escape(finding.kind)} · {escape(finding.label)}</h3>'
        f'<p class="soft">{escape(percent(finding.share))} of the step, '
        f"{finding.recoverable_s:.3f} s to win back, confidence {finding.confidence}</p>"
        f"<ul>{evidence}</ul><p><strong>Advice.</strong> {escape(finding.advice)}</p></section>"
    )


def _trace(measures: Measures) -> str:
    rows = "".join(
        f'<div class="row"><span>{escape(title)}</span>'
        f'<span class="bar"><i style="width:{100 * min(1.0, value):.1f}%"></i></span>'
        f"<b>{100 * value:.1f} %</b></div>"
        for title, value in ratios(measures)
    )
    return f'<section class="card"><p class="soft">{escape(origin(measures))}</p>{rows}</section>'
