"""Provides the advice of all findings, which advice.toml holds."""

from __future__ import annotations

import tomllib
from pathlib import Path

_ADVICE = tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))


def server_advice(kind: str, label: str) -> str | None:
    """Return the advice of a kind of finding that holds for inference servers, or None."""
    text: str | None = _ADVICE["server"].get(kind)
    return None if text is None else text.format(label=label)


def advice(kind: str, variant: str = "", **values: object) -> str:
    """Return the advice of a kind of finding; ``values`` fill its placeholders."""
    text: str = _ADVICE[kind][variant] if variant else _ADVICE[kind]
    return text.format(**values)
