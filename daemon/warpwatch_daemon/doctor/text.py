"""Findings as text: grouped, aligned, wrapped to the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from itertools import groupby

from warpwatch_daemon.doctor.check import Check
from warpwatch_runtime.quantities import plural

_MARKS = {True: "ok  ", False: "BAD ", None: "note"}
_LONGEST_NAME = 16


def lines(checks: Iterable[Check], width: int = 80) -> Iterator[str]:
    """One block a group, the problems by name, and a last line that counts."""
    checks = list(checks)
    for group, members in groupby(checks, key=lambda check: check.group):
        yield group
        for check in members:
            yield from _check(check, width)
        yield ""
    bad = dict.fromkeys(check.name for check in checks if check.ok is False)
    if bad:
        yield from _wrapped(", ".join(bad), "to fix: ", "        ", width)
    yield summary(checks)


def summary(checks: Iterable[Check]) -> str:
    verdicts = [check.ok for check in checks]
    problems, notes = verdicts.count(False), verdicts.count(None)
    return f"{plural(problems, 'problem')}, {plural(notes, 'note')}"


def _check(check: Check, width: int) -> Iterator[str]:
    head = f"  {_MARKS[check.ok]} {check.name:<{_LONGEST_NAME}} "
    indent = " " * (8 + _LONGEST_NAME)
    # A name that is too long pushes its own line only.
    yield from _wrapped(check.detail, head, indent, width)
    if check.advice:
        yield from _wrapped(check.advice, f"{indent}→ ", f"{indent}  ", width)


def _wrapped(text: str, head: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        width,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]
