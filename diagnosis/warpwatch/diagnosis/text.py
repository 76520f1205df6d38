"""The diagnosis for a terminal: the verdict first, then why, what to do, and the numbers."""

from __future__ import annotations

import textwrap

from warpwatch.diagnosis.diagnosis import Diagnosis
from warpwatch.diagnosis.measures import Measures
from warpwatch.diagnosis.rules.base import Finding, percent

WIDTH = 96
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


def ratios(measures: Measures) -> list[tuple[str, float]]:
    """Title and value of the known ratios of one trace, in the order of TITLES."""
    known = measures.to_json()
    values = dict(known["time"]) | dict(known["cpu"] or {})
    return [(TITLES[key], value) for key in TITLES if (value := values.get(key)) is not None]


def origin(measures: Measures) -> str:
    """One line: which trace this is."""
    parts = [measures.file]
    if measures.rank is not None:
        parts.append(f"rank {measures.rank}")
    parts.append(measures.device_name or ("GPU" if measures.gpu else "CPU only"))
    steps = len(measures.steps)
    parts.append(f"{steps} step{'' if steps == 1 else 's'}" if steps else "no steps annotated")
    parts.append(f"{measures.window_s:.3f} s")
    return ", ".join(printable(part) for part in parts)


def printable(text: str) -> str:
    """Names come from the trace: without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def render_text(diagnosis: Diagnosis) -> str:
    lines = [f"{diagnosis.verdict}: {printable(diagnosis.summary)}", ""]
    for number, finding in enumerate(diagnosis.findings, 1):
        lines += [*_finding(number, finding), ""]
    for measures in diagnosis.measures:
        lines += [*_numbers(measures), ""]
    return "\n".join(lines).rstrip() + "\n"


def _finding(number: int, finding: Finding) -> list[str]:
    head = f"{number}. {finding.kind}, {finding.label}: {percent(finding.share)} of the step"
    price = f"{finding.recoverable_s:.3f} s to win back, confidence {finding.confidence}"
    lines = [f"{printable(head)}, {price}"]
    for sentence in finding.evidence:
        lines += _wrapped(f"   - {printable(sentence)}", "     ")
    return lines + _wrapped(f"   Advice: {printable(finding.advice)}", "     ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False)


def _numbers(measures: Measures) -> list[str]:
    rows = [f"   {title:<26}{100 * value:5.1f} %" for title, value in ratios(measures)]
    return [origin(measures), *rows]
