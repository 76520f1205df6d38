"""Writes the grammar of the text format and of OpenMetrics: escaping, and headers of families."""

from __future__ import annotations


def escape(text: str) -> str:
    """Return a label's value as it stands between its quotes."""
    return encodable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def encodable(text: str) -> str:
    """Replace lone surrogates, as of a file name that is not UTF-8, which would fail the scrape."""
    return text.encode("utf-8", "replace").decode()


def header(name: str, kind: str, help: str, unit: str = "", *, openmetrics: bool) -> str:
    """Return HELP and TYPE of the family that holds the series ``name``."""
    text = help.replace("\\", "\\\\").replace("\n", "\\n")
    if not openmetrics:
        return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
    # OpenMetrics names a counter's family without ``_total``, and its unit.
    family = name.removesuffix("_total") if kind == "counter" else name
    named = f"# UNIT {family} {unit}\n" if unit and family.endswith(f"_{unit}") else ""
    quoted = text.replace('"', '\\"')
    return f"# TYPE {family} {kind}\n{named}# HELP {family} {quoted}\n"
