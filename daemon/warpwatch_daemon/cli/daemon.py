"""`warpwatch daemon`: watch this node: sample, detect, capture, serve."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from warpwatch_daemon.cli import parsing
from warpwatch_daemon.config import loading
from warpwatch_telemetry.errors import UsageError

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
    command.add_argument(
        "--watch-config",
        action="store_true",
        help="reload when the file's content changes, as a mounted ConfigMap's does",
    )
    arguments = command.parse_args(argv)
    logging.basicConfig(level=arguments.log_level, format=LOG_FORMAT)

    run(arguments.config, arguments.watch_config)
    return 0


def run(path: Path | None, watched: bool) -> None:
    from warpwatch_daemon.agent.app import Daemon
    from warpwatch_daemon.agent.config_watch import WATCH_INTERVAL_S, ConfigWatch

    if not watched:
        Daemon(loading.load(path), path).run()
        return
    if path is None:
        raise UsageError("--watch-config needs --config FILE")
    watch = ConfigWatch(path)
    daemon = Daemon(loading.load(path), path)

    def look() -> None:
        if watch.changed():
            daemon.reloading.ask()

    daemon.supervisor.every("config", WATCH_INTERVAL_S, look)
    daemon.run()
