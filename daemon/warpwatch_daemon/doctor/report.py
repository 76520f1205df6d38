"""Runs all groups of checks and prints their findings for a person."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from warpwatch_daemon.doctor import agent, driver, gpus, host, nccl, topology
from warpwatch_daemon.doctor.check import BAD, NOTE, OK, Check, CheckInputs, Group
from warpwatch_runtime.quantities import plural

# The groups in the order of the report; a new group is one line here.
GROUPS: dict[str, Group] = {
    "daemon": agent.daemon_checks,
    "agent": agent.checks,
    "driver": driver.checks,
    "devices": gpus.checks,
    "kernel log": gpus.xid_checks,
    "topology": topology.checks,
    "host": host.checks,
    "NCCL": nccl.checks,
    "schedulers": host.scheduler_checks,
}
_MARKS = {OK: "ok  ", BAD: "BAD ", NOTE: "note"}
_NAME_WIDTH = 16


def examine(inputs: CheckInputs) -> list[Check]:
    """Return the findings of all groups; for a daemon elsewhere only its own report."""
    groups = GROUPS if inputs.here else {"daemon": agent.daemon_checks}
    return [
        replace(check, group=name) for name, checks in groups.items() for check in checks(inputs)
    ]


def lines(checks: Iterable[Check], width: int = 80) -> Iterator[str]:
    """Yield one block per group, the names of the faults, and a last line that counts."""
    checks = list(checks)
    for group, members in groupby(checks, key=lambda check: check.group):
        yield group
        for check in members:
            yield from _check(check, width)
        yield ""
    bad = dict.fromkeys(check.name for check in checks if check.ok is BAD)
    if bad:
        yield from _wrapped(", ".join(bad), "to fix: ", "        ", width)
    verdicts = [check.ok for check in checks]
    problems, notes = verdicts.count(BAD), verdicts.count(NOTE)
    yield f"{plural(problems, 'problem')}, {plural(notes, 'note')}"


def _check(check: Check, width: int) -> Iterator[str]:
    head = f"  {_MARKS[check.ok]} {check.name:<{_NAME_WIDTH}} "
    indent = " " * (8 + _NAME_WIDTH)
    # A long name shifts only its own line.
    yield from _wrapped(check.detail, head, indent, width)
    if check.advice:
        yield from _wrapped(check.advice, f"{indent}→ ", f"{indent}  ", width)


def _wrapped(text: str, head: str, indent: str, width: int) -> list[str]:
    wrapped = textwrap.wrap(
        " ".join(text.split()),
        width,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped or [head.rstrip()]
