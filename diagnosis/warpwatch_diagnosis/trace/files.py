"""Provides the error for an unusable input, names of files, and reading of small JSON files."""

from __future__ import annotations

import json
import re
from typing import Any, BinaryIO, Literal, Protocol

REDUCTION = ".reduction.gz"
MAX_BYTES = 16 << 20
# Larger values are not plausible as seconds or bytes.
MAX_NUMBER = 1e15
_RANK_IN_NAME = re.compile(r"rank[_-]?(\d{1,6})\.", re.IGNORECASE)


class TraceError(Exception):
    """A file that cannot be diagnosed. The text is one line: the file and what is wrong with it."""


class TraceSource(Protocol):
    """A Path, or a file that was opened before and acts as one."""

    @property
    def name(self) -> str: ...

    def open(self, mode: Literal["rb"], /) -> BinaryIO: ...


def reduction_name(trace: str) -> str:
    """Return ``rank3.reduction.gz`` for ``rank3.pt.trace.json.gz``."""
    return trace.partition(".")[0] + REDUCTION


def rank_in_name(name: str) -> int | None:
    """Return the rank in the name of a file, or None."""
    found = _RANK_IN_NAME.search(name)
    return int(found[1]) if found else None


def load_json(path: TraceSource) -> Any:
    """Return the content of a JSON file of at most MAX_BYTES. Raises TraceError."""
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
