"""`warpwatch top`: GPUs, ranks and anomalies of an agent or a fleet, live in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from warpwatch_daemon.cli import parsing
from warpwatch_runtime import command_line
from warpwatch_telemetry.errors import UsageError


def main(argv: Sequence[str]) -> int:
    command = command_line.parser(
        "top",
        "GPUs, ranks with their phases, anomalies and captures, live. Key c captures the selected "
        "rank's job. Without colours where NO_COLOR is set.",
        "warpwatch top --url https://gpu-1:9400 --token-file token --ca-file ca.crt",
    )
    parsing.add_daemon(command)
    command.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between looks (default 2)"
    )
    arguments = command.parse_args(argv)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("warpwatch top needs a terminal; `warpwatch status` prints what is known")
    try:
        from warpwatch_daemon.cli.top_screen import Top, TopClient
    except ModuleNotFoundError as error:
        if error.name not in ("textual", "rich"):
            raise
        raise UsageError("warpwatch top needs textual: install the extra warpwatch[top]") from error
    client = TopClient(lambda: parsing.api(arguments))
    # A wrong address or token is an error now; later failures may pass.
    client.read()
    Top(client, max(0.5, arguments.interval)).run()
    return 0
