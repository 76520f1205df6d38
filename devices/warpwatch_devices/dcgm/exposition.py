"""The text that dcgm-exporter serves, read strictly and line by line.

An own reader of the few lines that are wanted: one that is broken costs itself alone, nothing is
to be installed, and prometheus_client.parser, which gives up at the first broken line, costs
4 MiB of memory (1.4 MiB in the daemon).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

# dcgm-exporter's lines have some hundred characters; with many pod labels some thousand.
MAX_LINE_CHARACTERS = 16_384

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|[Ii]nf|[Nn]a[Nn])"
_LINE = re.compile(rf"(\w+)\{{(.*)\}}[ \t]+({_NUMBER})(?:[ \t]+-?\d+)?[ \t\r]*", re.ASCII)
_OF_DCGM = re.compile(r"^(DCGM_\w+).*", re.ASCII | re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"(?:,|\Z)', re.ASCII)
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", '"': '"', "\\": "\\"}


class Series(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str, names: Container[str]) -> Iterator[Series | None]:
    """The series whose name is one of ``names``; None for each of their lines that is broken."""
    for line in _OF_DCGM.finditer(text):
        if line[1] in names:
            yield _series(line[0])


def _series(line: str) -> Series | None:
    match = _LINE.fullmatch(line) if len(line) <= MAX_LINE_CHARACTERS else None
    labels = None if match is None else _labels(match[2])
    if match is None or labels is None:
        return None
    return Series(match[1], labels, float(match[3]))


def _labels(text: str) -> dict[str, str] | None:
    labels: dict[str, str] = {}
    position = 0
    while position < len(text):
        match = _LABEL.match(text, position)
        if match is None or match[1] in labels:
            return None
        labels[match[1]] = _ESCAPE.sub(lambda e: _ESCAPED.get(e[1], e[0]), match[2])
        position = match.end()
    return labels
