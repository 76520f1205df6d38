"""The grammar of Prometheus' text format and of OpenMetrics: escaping, and a family's header."""

from __future__ import annotations


def escape(text: str) -> str:
    """A label's value between its quotes."""
    return encodable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def encodable(text: str) -> str:
    """Without lone surrogates, as of a file name that is not UTF-8: one would fail the scrape."""
    return text.encode("utf-8", "replace").decode()


def header(name: str, kind: str, help: str, unit: str = "", *, openmetrics: bool) -> str:
    """HELP and TYPE of the family that holds the series ``name``."""
    text = help.replace("\\", "\\\\").replace("\n", "\\n")
    if not openmetrics:
        return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
    # OpenMetrics names a counter's family without ``_total``, and its unit.
    family = name.removesuffix("_total") if kind == "counter" else name
    named = f"# UNIT {family} {unit}\n" if unit and family.endswith(f"_{unit}") else ""
    quoted = text.replace('"', '\\"')
    return f"# TYPE {family} {kind}\n{named}# HELP {family} {quoted}\n"
