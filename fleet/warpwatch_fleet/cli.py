"""`warpwatch fleet`: watch the agents of all nodes, so that a job over many nodes is one job."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

from warpwatch_runtime import command_line, loading, log_output
from warpwatch_runtime.bus import Bus, BusConfig, BusError, check
from warpwatch_telemetry.errors import UsageError


def main(argv: Sequence[str]) -> int:
    command = command_line.parser(
        "fleet",
        "Follow the agents of all nodes until SIGTERM, judge jobs over several nodes as one, "
        "serve HTTP. The section `fleet` of the configuration says where the agents are.",
        "warpwatch fleet --config /etc/warpwatch/warpwatch.yaml",
    )
    # By default the signal with which a daemon reloads would end the fleet without a word.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    command_line.add_config(command)
    command.add_argument(
        "--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"]
    )
    command.add_argument(
        "--create-streams",
        type=int,
        nargs="?",
        const=1,
        metavar="REPLICAS",
        help="create the stream and the buckets on the bus, with so many replicas (1), and end",
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
    config = loading.load(FleetFile, arguments.config)
    if arguments.create_streams is not None:
        return _create_streams(config.bus, arguments.create_streams)
    if config.bus.url is None:
        Fleet(config).run()
        return 0
    from warpwatch_fleet.bus.fleet import WorkerFleet

    WorkerFleet(config).run()
    return 0


def check_file(path: Path) -> None:
    """Check the file as the fleet reads it; the command `config` calls it. Raises UsageError."""
    from warpwatch_fleet.config import FleetFile

    loading.load(FleetFile, path)


def _create_streams(config: BusConfig, replicas: int) -> int:
    from warpwatch_fleet.bus import streams

    async def create() -> None:
        bus = Bus(config, "fleet.setup")
        await bus.connect()
        try:
            await streams.create(bus, replicas)
        finally:
            await bus.close()

    if config.url is None:
        raise UsageError("--create-streams needs bus.url")
    check(config)
    try:
        asyncio.run(create())
    except BusError as error:
        raise UsageError(f"the bus {config.url}: {error}") from error
    return 0
