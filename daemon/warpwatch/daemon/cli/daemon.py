"""`warpwatch daemon`: the agent in the foreground."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from warpwatch.daemon import config as configuration
from warpwatch.daemon.cli import parsing

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(argv: Sequence[str]) -> int:
    command = parsing.parser(
        "daemon",
        "Watch this node until SIGTERM: sample devices, host and ranks, detect anomalies, "
        "capture and diagnose, serve HTTP. SIGHUP reloads the configuration.",
        "warpwatch daemon --config /etc/warpwatch/warpwatch.yaml",
    )
    parsing.add_config(command)
    command.add_argument(
        "--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"]
    )
    arguments = command.parse_args(argv)
    logging.basicConfig(level=arguments.log_level, format=LOG_FORMAT)

    from warpwatch.daemon.app import Daemon

    Daemon(configuration.load(arguments.config), arguments.config).run()
    return 0
