"""Decodes what child processes write.

A child reads hostile files, and may have been taken over by one: its documents are checked like
those of any stranger, wherever they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from warpwatch_telemetry import clean_text

# A diagnosis of a thousand ranks has a few megabytes.
MAX_BYTES = 32 * 2**20
MAX_EVENTS = 2**40

_Amount = Annotated[float, Meta(ge=0, le=1e12)]


class _Roofline(msgspec.Struct):
    mfu_ratio: _Amount | None = None


class _Trace(msgspec.Struct):
    window_s: _Amount | None = None
    steps: Annotated[int, Meta(ge=0, le=MAX_EVENTS)] | None = None
    roofline: _Roofline | None = None


class _Finding(msgspec.Struct):
    kind: str
    share: _Amount | None = None
    advice: str | None = None


class _Diagnosis(msgspec.Struct):
    """The fields of a diagnosis that others read; the rest is only shown as JSON."""

    verdict: str
    summary: str | None = None
    findings: list[_Finding] = []
    traces: list[_Trace] = []


_Verified = tuple[Annotated[int, Meta(ge=0, le=MAX_EVENTS)] | None, tuple[str, ...]]
_verified: msgspec.json.Decoder[_Verified] = msgspec.json.Decoder(_Verified)


def read_diagnosis(folder: Path) -> Mapping[str, Any] | None:
    """Return ``diagnosis.json`` of a capture's folder, or None if there is no valid one."""
    try:
        with (folder / "diagnosis.json").open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            return None
        document: Mapping[str, Any] = clean_text.load(content)
        msgspec.convert(document, _Diagnosis)
    except (OSError, ValueError):
        return None
    return document


def verified(line: str) -> tuple[int | None, tuple[str, ...]]:
    """Return the events of a trace and what it lacks. Raises ValueError."""
    return _verified.decode(clean_text.clean_line(line.encode()))
