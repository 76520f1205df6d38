"""Provides the words that a report uses for the identifiers of the JSON, some from words.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from warpwatch_diagnosis.measures.measures import Measures

_WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
VERDICTS: Mapping[str, str] = _WORDS["verdicts"]
PARTS: Mapping[str, str] = {part: title for part, (title, _) in _WORDS["parts"].items()}
COLUMN_HEADS: Mapping[str, str] = {part: head for part, (_, head) in _WORDS["parts"].items()}
# The titles of spans in a timeline's lanes.
LANES: Mapping[str, str] = {**_WORDS["lanes"], **PARTS}
_MAX_TEXT = 2_000
_MAX_DEVICE = 100
_MATRIX = frozenset({"gemm", "convolution", "attention"})
_COPIES = frozenset({"HtoD", "DtoH", "DtoD", "PtoP", "HtoH", "memset"})


def title(kind: str, capture: Sequence[Measures]) -> str:
    """Return the title of a verdict or finding in a report of these traces."""
    on_cpu = all(measures.gpu is None for measures in capture)
    serves = any(measures.server is not None for measures in capture)
    titles = dict(VERDICTS)
    if on_cpu:
        titles |= _WORDS["verdicts_on_cpu"]
    if serves:
        titles |= _WORDS["verdicts_of_servers"]
    return titles[kind]


def stream_label(label: str) -> str:
    """Return the label that colours a kernel's class or a copy's direction."""
    if label in _MATRIX:
        return "matrix"
    if label == "communication":
        return "collective"
    return "transfer" if label in _COPIES else "other_kernel"


def printable(text: str) -> str:
    """Replace the characters of a trace that a terminal would obey or a file cannot hold."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def origin(measures: Measures) -> str:
    """Return one line that identifies the trace."""
    parts = [measures.file]
    if measures.rank is not None:
        parts.append(f"rank {measures.rank}")
    parts.append(
        (measures.device_name or "")[:_MAX_DEVICE] or ("GPU" if measures.gpu else "CPU only")
    )
    steps = len(measures.steps)
    parts.append(f"{steps} step{'' if steps == 1 else 's'}" if steps else "no steps annotated")
    parts.append(f"{measures.window_s:.3f} s")
    return ", ".join(printable(part) for part in parts)


def safe(text: str) -> str:
    """Escape text for HTML and its attributes, and cut it where no sentence of ours ends."""
    return escape(printable(text[:_MAX_TEXT]))


def sentence(text: str) -> str:
    """Add a full stop, and a capital unless the text begins with a name of the trace."""
    first = text.partition(" ")[0]
    if first.isalpha():
        text = text[:1].upper() + text[1:]
    end = "" if text[-1:] in (".", "!", "?", "…") else "."
    return text + end


def duration(us: float) -> str:
    """Return a duration in the unit that fits."""
    if not us:
        return "0"
    if us >= 1e6:
        return f"{us / 1e6:,.2f} s"
    if us >= 1e3:
        return f"{us / 1e3:,.1f} ms"
    return f"{us:,.0f} µs"


def size(count: float | None) -> str:
    """Return bytes in decimal units, as bandwidths have them."""
    if count is None:
        return "-"
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= limit:
            return f"{count / limit:,.1f} {unit}"
    return f"{count:,.0f} B"


def short(name: str | None, limit: int = 60) -> str:
    """Return the start of a name from the trace: templates of kernels grow to many kB."""
    name = name or ""
    return name if len(name) <= limit else name[: limit - 1] + "…"


def listed(names: Sequence[str], limit: int = 8) -> str:
    """Return ``a, b and 3 more``."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def milliseconds(us: float) -> str:
    return f"{us / 1e3:,.1f} ms"


def times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
