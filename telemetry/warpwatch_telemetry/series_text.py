"""Series of devices as text, as the telemetry log and the API have them, and back.

A name without the prefix ``device_``, own labels in braces: ``power_watts``,
``clock_hertz{domain=sm}``, ``process_gpu_memory_bytes{pid=17,process=python}``. A backslash escapes
a comma, brace or backslash in a label's value. A metric that the catalogue does not know keeps its
name and labels as written, so an older reader understands a newer log.
"""

from __future__ import annotations

import functools
import re

from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.metric import SeriesKey

_DEVICE = "device_"
_SERIES = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})?", re.DOTALL)
_LABEL = re.compile(r"(?P<label>\w+)=(?P<value>(?:\\.|[^\\,}])*)(?:,|$)", re.DOTALL)


def series_text(key: SeriesKey) -> str:
    """A series as text."""
    name, values = key
    row = CATALOGUE.get(name)
    labels = row.labels if row else tuple(f"label{i}" for i in range(len(values)))
    text = name.removeprefix(_DEVICE)
    if not values:
        return text
    pairs = zip(labels, values, strict=False)
    own = ",".join(f"{label}=" + re.sub(r"([\\,}])", r"\\\1", value) for label, value in pairs)
    return f"{text}{{{own}}}"


# A log repeats the same few hundred; process ids come and go.
@functools.lru_cache(maxsize=4096)
def series_key(text: str) -> SeriesKey:
    """The inverse of series_text. Raises ValueError when the text is no series."""
    match = _SERIES.fullmatch(text)
    if match is None:
        raise ValueError(f"metrics: {text!r} is no metric")
    name = match["name"] if match["name"] in CATALOGUE else _DEVICE + match["name"]
    given = _labels(text, match["labels"] or "")
    row = CATALOGUE.get(name)
    labels = row.labels if row else tuple(given)
    return name, tuple(given.get(label, "") for label in labels)


def _labels(text: str, inside: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    position = 0
    while position < len(inside):
        match = _LABEL.match(inside, position)
        if match is None:
            raise ValueError(f"metrics: {text!r} has bad labels")
        labels[match["label"]] = re.sub(r"\\(.)", r"\1", match["value"], flags=re.DOTALL)
        position = match.end()
    return labels
