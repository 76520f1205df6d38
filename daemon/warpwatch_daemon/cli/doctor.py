"""`warpwatch doctor`: check what this machine offers and what is missing."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby

from warpwatch._version import __version__
from warpwatch_daemon.cli import parsing
from warpwatch_daemon.config import Config
from warpwatch_daemon.doctor import driver, gpus, host, interconnect
from warpwatch_daemon.doctor.check import BAD, NOTE, OK, Check, CheckInputs, Group, Machine
from warpwatch_daemon.ranks.folder import in_use
from warpwatch_devices.nvml import survey
from warpwatch_runtime import command_line, loading
from warpwatch_runtime.command_line import say
from warpwatch_runtime.quantities import plural
from warpwatch_serving.config import url_of

# The groups in the order of the report; a new group is one line here.
GROUPS: dict[str, Group] = {
    "daemon": host.daemon_checks,
    "agent": host.agent_checks,
    "driver": driver.checks,
    "devices": gpus.checks,
    "kernel log": gpus.xid_checks,
    "topology": interconnect.topology_checks,
    "host": host.host_checks,
    "NCCL": interconnect.nccl_checks,
    "schedulers": host.scheduler_checks,
}
_MARKS = {OK: "ok  ", BAD: "BAD ", NOTE: "note"}
_NAME_WIDTH = 16
_NARROWEST, _WIDEST = 60, 120
_MAX_PATIENCE_S = 3600.0


def main(argv: Sequence[str]) -> int:
    command = command_line.parser(
        "doctor",
        "Check this node: driver, GPUs, topology, host, NCCL, schedulers, and what the daemon "
        "needs; each finding with what to do. With --url of a daemon elsewhere only what that "
        "daemon reports. Exit 1 when something is wrong.",
        "warpwatch doctor",
    )
    command_line.add_config(command)
    parsing.add_daemon(command)
    command_line.add_json(command)
    command.add_argument(
        "--patience",
        type=_patience,
        default=survey.DEFAULT_PATIENCE_S,
        metavar="SECONDS",
        help="how long a call of the driver may take before it is stuck (default %(default)g)",
    )
    arguments = command.parse_args(argv)
    config = loading.load(Config, arguments.config)
    folder, _ = in_use(config.rendezvous, os.environ, os.getuid())
    own = {"WARPWATCH_DIR": str(folder)}
    api = parsing.api(arguments, own, default_url=url_of(config.http.listen))
    here = api.is_local or not arguments.url
    answers = survey.Survey(asked=False)
    if here and config.sources.nvml.enabled:
        answers = survey.survey(arguments.patience)
    checks = examine(CheckInputs(config, api, Machine(), answers, here))
    if arguments.json:
        say(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        width = min(max(shutil.get_terminal_size((80, 24)).columns, _NARROWEST), _WIDEST)
        say(f"warpwatch {__version__}\n")
        say("\n".join(lines(checks, width)))
    return 1 if any(check.ok is False for check in checks) else 0


def _patience(text: str) -> float:
    """Return the seconds. Raises ArgumentTypeError: without patience every driver would hang."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= _MAX_PATIENCE_S:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and at most {_MAX_PATIENCE_S:g}")


def examine(inputs: CheckInputs) -> list[Check]:
    """Return the findings of all groups; for a daemon elsewhere only its own report."""
    groups = GROUPS if inputs.here else {"daemon": host.daemon_checks}
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
