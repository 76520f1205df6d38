"""`warpwatch daemon`: watch this node: sample, detect, capture, serve."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from warpwatch_daemon.config import WATCH_INTERVAL_S, Config, ConfigWatch
from warpwatch_runtime import command_line, loading, log_output
from warpwatch_telemetry.errors import UsageError


def main(argv: Sequence[str]) -> int:
    command = command_line.parser(
        "daemon",
        "Watch this node until SIGTERM: sample devices, host and ranks, detect anomalies, "
        "capture and diagnose, serve HTTP. SIGHUP reloads the configuration.",
        "warpwatch daemon --config /etc/warpwatch/warpwatch.yaml",
    )
    # By default a reload that is requested too early would end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    command_line.add_config(command)
    command.add_argument(
        "--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"]
    )
    command.add_argument(
        "--watch-config",
        action="store_true",
        help="reload when the file's content changes, as a mounted ConfigMap's does",
    )
    command.add_argument(
        "--require-http",
        action="store_true",
        help="exit 2 if http.listen is taken; without it, the port is tried again",
    )
    arguments = command.parse_args(argv)
    log = log_output.LimitedHandler()
    logging.basicConfig(level=arguments.log_level, handlers=[log])

    run(arguments.config, arguments.watch_config, log, arguments.require_http)
    return 0


def run(
    path: Path | None, watched: bool, log: log_output.LimitedHandler, needs_http: bool = False
) -> None:
    from warpwatch_daemon.agent.app import Daemon

    # The daemon sets the modes of files that other users may read or write.
    os.umask(0o077)
    if watched and path is None:
        raise UsageError("--watch-config needs --config FILE")
    watch = ConfigWatch(path) if watched and path else None
    daemon = Daemon(loading.load(Config, path), path)
    if needs_http and daemon.server.trouble:
        raise UsageError(daemon.server.trouble)

    def look() -> None:
        if watch is not None and watch.changed():
            daemon.reloading.request()

    daemon.supervisor.every("log", log_output.REPORT_INTERVAL_S, log.report)
    if watch is not None:
        daemon.supervisor.every("config", WATCH_INTERVAL_S, look)
    daemon.run()
