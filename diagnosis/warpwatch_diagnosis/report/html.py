"""Renders the diagnosis as one page without network and script; text of traces is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from warpwatch_diagnosis.before_after import BaselineComparison
from warpwatch_diagnosis.diagnosis import HEALTHY, INCONCLUSIVE, NO_PROBLEM, Diagnosis
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.measures.operators import OperatorTime
from warpwatch_diagnosis.report import handover
from warpwatch_diagnosis.report.drawing import Breakdown, step_bars, time_bars, timeline
from warpwatch_diagnosis.rules.base import Finding
from warpwatch_diagnosis.words import duration, percent, safe, sentence, short, size, title

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
        why = f"{_todo('What to change', first.advice)}{gain}{_list(first.evidence[1:])}"
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


# Names of templates grow to thousands of characters; the file must stay small.
_MAX_NAME = 160
_SHOWN = 20
_NONE = "-"

Row = Sequence[str]


def tables(diagnosis: Diagnosis, chosen: Measures) -> str:
    """Return the tables of the chosen rank and of the capture that have rows."""
    operators = chosen.operators
    found = "".join(_comparison(c) for c in diagnosis.comparison if c.label == chosen.label)
    found += _collectives(diagnosis) + _device(chosen) + _synchronization(chosen)
    found += _operators("Operators by time on the CPU", operators.by_self_time)
    if chosen.gpu:
        found += _operators("Operators by time on the GPU", operators.by_gpu_time)
    found += _memory(chosen)
    whose = f" of {chosen.label}" if len(diagnosis.measures) > 1 else ""
    return f"<h2>Details{safe(whose)}</h2>{found}" if found else ""


def _table(title: str, heads: Row, rows: Iterable[Row], opened: bool = False) -> str:
    """Return a table; columns are numbers, except the first one and heads that begin with ~."""
    lines = list(rows)
    if not lines:
        return ""
    texts = {n for n, head in enumerate(heads) if n == 0 or head.startswith("~")}

    def cells(tag: str, line: Row) -> str:
        classes = ("" if n in texts else " class=n" for n in range(len(line)))
        return "".join(
            f"<{tag}{css}>{safe(cell)}</{tag[:2]}>" for css, cell in zip(classes, line, strict=True)
        )

    head = cells('th scope="col"', [name.removeprefix("~") for name in heads])
    body = "".join(f"<tr>{cells('td', line)}</tr>" for line in lines)
    return (
        f"<details{' open' if opened else ''}><summary>{safe(title)}</summary>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{safe(title)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def _name(text: str | None) -> str:
    return short(text, _MAX_NAME) or _NONE


def _ratio(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.1f} %"


def _number(value: float | None, digits: int = 1) -> str:
    return _NONE if value is None else f"{value:,.{digits}f}"


def _device(measures: Measures) -> str:
    gpu = measures.gpu
    if gpu is None:
        return ""
    names = [
        (_name(k.name), k.kernel_class, f"{k.count:,}", duration(k.total_us),
         duration(k.median_us), _ratio(k.occupancy_ratio))
        for k in gpu.kernel_times
    ]  # fmt: skip
    heads = ("name", "~class", "count", "time", "median", "occupancy")
    kernels = _classes(measures, gpu) + _table("Kernels by name", heads, names)
    return kernels + _copies(gpu) + _launches(gpu)


def _classes(measures: Measures, gpu: GpuTime) -> str:
    window_us = measures.window_us or 1.0
    limits = {c.kernel_class: c for c in measures.roofline.classes} if measures.roofline else {}
    rows = []
    for c in gpu.class_times:
        limit = limits.get(c.kernel_class)
        bound = (limit.bound if limit else None) or _NONE
        peak = _ratio(limit.flops_ratio if limit else None)
        rows.append(
            (c.kernel_class, f"{c.count:,}", duration(c.total_us), _ratio(c.busy_us / window_us),
             f"{c.short_count:,}", _ratio(c.occupancy_ratio), bound, peak)
        )  # fmt: skip
    heads = (
        "class", "count", "time", "of the window", "under 10 µs", "occupancy", "~limited by",
        "of peak FLOP/s",
    )  # fmt: skip
    return _table("Kernels by class", heads, rows, opened=True)


def _copies(gpu: GpuTime) -> str:
    rows = [
        (c.direction, c.memory or _NONE, f"{c.count:,}", size(c.bytes), duration(c.total_us),
         duration(c.exposed_us), _number(c.bandwidth_gb_per_s))
        for c in gpu.copy_times
    ]  # fmt: skip
    heads = ("direction", "~host memory", "count", "bytes", "time", "not hidden", "GB/s")
    return _table("Copies", heads, rows)


def _launches(gpu: GpuTime) -> str:
    found = gpu.launches
    rows = [
        ("launch calls with their work in the trace", f"{found.count:,}"),
        ("median launch call", duration(found.median_call_us)),
        ("median delay until the work begins", duration(found.median_delay_us)),
        ("kernels shorter than their launch call", f"{found.short_kernels:,}"),
        ("launch calls over 50 µs", f"{found.slow_calls:,}"),
        ("work that begins over 100 µs after its launch", f"{found.late_starts:,}"),
        ("kernels launched by CUDA graphs", f"{found.in_graphs:,}"),
    ]
    rows += [
        (f"queue of stream {q.stream}: mean, longest", f"{q.mean:,.1f}, {q.longest:,}")
        for q in found.queues[:_SHOWN]
    ]
    return _table("Launches", ("what", "value"), rows if found.count else [])


def _synchronization(measures: Measures) -> str:
    title = "Calls that wait for the GPU" if measures.gpu else "Operators that would wait for a GPU"
    rows = [
        (_name(c.name), _name(c.operator), _name(c.place), c.purpose, f"{c.count:,}",
         duration(c.total_us), duration(c.longest_us))
        for c in measures.synchronization.calls
    ]  # fmt: skip
    heads = ("call", "~inside", "~line", "~for", "count", "time", "longest")
    return _table(title, heads, rows)


def _operators(title: str, times: Sequence[OperatorTime]) -> str:
    rows = [
        (_name(o.name), _name(o.shapes), _name(o.place), f"{o.count:,}", duration(o.self_us),
         duration(o.total_us), duration(o.gpu_us), _number(o.flops and o.flops / 1e9, 2))
        for o in times
    ]  # fmt: skip
    heads = ("operator", "~shapes", "~line", "count", "self", "with children", "GPU", "GFLOP")
    return _table(title, heads, rows)


def _collectives(diagnosis: Diagnosis) -> str:
    if diagnosis.alignment is None:
        return ""
    rows = [
        (_name(c["name"]), f"{c['ranks']}", f"{c['count']:,}", size(c["bytes"]),
         duration(c["transfer_us"]), duration(c["wait_us"]), duration(c["median_skew_us"]),
         _number(c["bus_gb_per_s"]))
        for c in diagnosis.alignment.by_name()
    ]  # fmt: skip
    heads = (
        "collective", "ranks", "count", "bytes", "transfer", "waiting for the last rank",
        "median skew", "bus GB/s",
    )  # fmt: skip
    return _table("Collectives of all ranks", heads, rows, opened=True)


def _memory(measures: Measures) -> str:
    rows = [
        (m.device if m.device == "cpu" else f"GPU {m.device}", f"{m.allocations:,}",
         size(m.allocated_peak_bytes), size(m.reserved_peak_bytes), size(m.growth_bytes))
        for m in measures.memory
    ]  # fmt: skip
    heads = ("device", "allocations", "peak allocated", "peak reserved", "growth")
    return _table("Memory", heads, rows)


def _comparison(comparison: BaselineComparison) -> str:
    phases = [
        (p.phase.replace("_", " "), _ms(p.before_ms), _ms(p.now_ms), f"{p.change_ms:+,.2f}")
        for p in comparison.phases
        if p.before_ms or p.now_ms
    ]
    phases.insert(
        0,
        ("step", _ms(comparison.before_step_ms), _ms(comparison.now_step_ms),
         f"{comparison.now_step_ms - comparison.before_step_ms:+,.2f}"),
    )  # fmt: skip
    kernels = [
        (_name(k.name), k.change, _ms(k.before_ms), _ms(k.now_ms), f"{k.change_ms:+,.2f}",
         _number(k.before_count), _number(k.now_count))
        for k in comparison.kernels
    ]  # fmt: skip
    heads = ("ms a step", "baseline", "now", "change")
    kernel_heads = ("kernel, ms a step", "~", "baseline", "now", "change", "count then", "now")
    return _table("Against the baseline", heads, phases, opened=True) + _table(
        "Kernels against the baseline", kernel_heads, kernels
    )


def _ms(value: float) -> str:
    return f"{value:,.2f}"
