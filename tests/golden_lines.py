"""Objects as lines of golden files: one line per object, and only the fields that are set."""

import json

import msgspec


def line(name: str, value: object) -> str:
    """Return the fields of ``value``; floats with four digits, times modulo 1,000,000 s."""
    fields = json.loads(msgspec.json.encode(value), parse_float=_rounded)
    said = (f"{key}={field}" for key, field in fields.items() if field not in (None, "", [], {}, 0))
    return " ".join([name, *said]) + "\n"


def _rounded(text: str) -> str:
    number = float(text)
    return f"{round(number % 1e6 if number > 1e9 else number, 6):.4g}"
