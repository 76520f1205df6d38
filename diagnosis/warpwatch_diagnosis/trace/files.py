"""What the JSON files of one rank have in common: bounded, and nothing in them is believed."""

from __future__ import annotations

import json
import re
from typing import Any, BinaryIO, Literal, Protocol


class TraceError(Exception):
    """A file that cannot be diagnosed. The text is one line: the file and what is wrong with it."""


REDUCTION = ".reduction.gz"


def reduction_name(trace: str) -> str:
    """``rank3.pt.trace.json.gz`` becomes ``rank3.reduction.gz``."""
    return trace.partition(".")[0] + REDUCTION


MAX_BYTES = 16 << 20
# What is not less is no number of seconds or bytes.
MAX_NUMBER = 1e15
_NAMED = re.compile(r"rank[_-]?(\d{1,6})\.")


class TraceSource(Protocol):
    """A Path, or what stands for one whose file was opened before."""

    @property
    def name(self) -> str: ...

    def open(self, mode: Literal["rb"], /) -> BinaryIO: ...


def rank_in_name(path: TraceSource) -> int | None:
    """The rank of a file of this name, if it is in it."""
    named = _NAMED.search(path.name)
    return int(named[1]) if named else None


def load_json(path: TraceSource) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise TraceError(f"{path}: more than {MAX_BYTES:,} bytes")
        return json.loads(data)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise TraceError(f"{path}: is cut short or not JSON") from None


def dicts(values: Any) -> list[dict[str, Any]]:
    return [v for v in values if isinstance(v, dict)] if isinstance(values, list) else []


def text_of(value: Any) -> str:
    return value[:300] if isinstance(value, str) else "?"


def number_of(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < MAX_NUMBER else None
