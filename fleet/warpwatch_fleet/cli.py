"""`warpwatch fleet`: watch the agents of all nodes, so that a job over many nodes is one job."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from warpwatch_runtime import command_line, loading, log_output
from warpwatch_telemetry.errors import UsageError


def main(argv: Sequence[str]) -> int:
    command = command_line.parser(
        "fleet",
        "Follow the agents of all nodes until SIGTERM, judge jobs over several nodes as one, "
        "serve HTTP. The section `fleet` of the configuration says where the agents are.",
        "warpwatch fleet --config /etc/warpwatch/warpwatch.yaml",
    )
    command_line.add_config(command)
    command.add_argument(
        "--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"]
    )
    arguments = command.parse_args(argv)
    logging.basicConfig(level=arguments.log_level, handlers=[log_output.LimitedHandler()])
    # Each batch of each agent would be a line.
    logging.getLogger("httpx").setLevel("WARNING")
    try:
        from warpwatch_fleet.config import FleetFile
        from warpwatch_fleet.fleet import Fleet
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        raise UsageError("warpwatch fleet needs the extra warpwatch[fleet]") from error
    Fleet(loading.load(FleetFile, arguments.config)).run()
    return 0
