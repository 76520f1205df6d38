"""Cleans text of strangers: no control characters, no line breaks, no lone surrogates.

Rings and agents are cleaned on arrival, so that pages, metrics, logs and terminals can print what
they are given.
"""

from __future__ import annotations

import json
import re
from typing import Any

# C0 and C1 controls, line and paragraph separators, marks that reverse the direction of text, and
# surrogates, which UTF-8 cannot hold.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Deeper than any document of ours.
MAX_DEPTH = 32


def clean(text: str, limit: int | None = None) -> str:
    """Return one line of at most ``limit`` characters, each control character as a space."""
    return _CONTROL.sub(" ", text)[:limit].strip()


def clean_line(line: bytes) -> bytes:
    """Return the line of JSON with all of its texts cleaned. Raises ValueError."""
    # In ASCII without an escape there is no character to clean.
    if line.isascii() and b"\\" not in line and b"\x7f" not in line:
        return line
    return json.dumps(load(line)).encode()


def load(text: bytes) -> Any:
    """Return the value of a JSON text with all of its texts cleaned.

    Raises ValueError if it is not JSON, or nested deeper than MAX_DEPTH.
    """
    try:
        return _cleaned(json.loads(text, parse_constant=_not_a_number), 0)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _not_a_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _cleaned(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return _CONTROL.sub(" ", value)
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        return {_CONTROL.sub(" ", key): _cleaned(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list):
        return [_cleaned(one, depth + 1) for one in value]
    return value
