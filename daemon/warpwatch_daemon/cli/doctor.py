"""`warpwatch doctor`: check what this machine offers and what is missing."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict

from warpwatch._version import __version__
from warpwatch_daemon.cli import parsing
from warpwatch_daemon.config import Config
from warpwatch_daemon.doctor import report
from warpwatch_daemon.doctor.check import CheckInputs, Machine
from warpwatch_daemon.ranks.folder import resolve
from warpwatch_devices.nvml import survey
from warpwatch_runtime import command_line, loading
from warpwatch_runtime.command_line import say

_NARROWEST, _WIDEST = 60, 120


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
        type=float,
        default=survey.DEFAULT_PATIENCE_S,
        metavar="SECONDS",
        help="how long a call of the driver may take before it is stuck (default %(default)g)",
    )
    arguments = command.parse_args(argv)
    config = loading.load(Config, arguments.config)
    folder, _ = resolve(config.rendezvous, os.environ, os.getuid())
    own = {"WARPWATCH_DIR": str(folder)}
    api = parsing.api(arguments, own, default_url=f"http://{config.http.listen}")
    here = api.is_local or not arguments.url
    answers = survey.Survey(asked=False)
    if here and config.sources.nvml.enabled:
        answers = survey.survey(arguments.patience)
    checks = report.examine(CheckInputs(config, api, Machine(), answers, here))
    if arguments.json:
        say(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A terminal without Unicode shows a question mark rather than nothing.
            sys.stdout.reconfigure(errors="replace")
        width = min(max(shutil.get_terminal_size((80, 24)).columns, _NARROWEST), _WIDEST)
        say(f"warpwatch {__version__}\n")
        say("\n".join(report.lines(checks, width)))
    return 1 if any(check.ok is False for check in checks) else 0
