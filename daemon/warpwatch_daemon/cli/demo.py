"""`warpwatch demo`: see the whole loop without a GPU."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from warpwatch_daemon.demo.processes import MAX_NODES, DemoNodes, DemoProcesses
from warpwatch_daemon.demo.story import FAULTS, DemoFault, Ending, Story
from warpwatch_runtime import command_line
from warpwatch_runtime.command_line import say
from warpwatch_telemetry.errors import WarpwatchError


def main(argv: Sequence[str]) -> int:
    command = command_line.parser(
        "demo",
        "Eight simulated GPUs, a real two-rank training on the CPU, a fault switched on while it\n"
        "runs: watch it being found, captured and diagnosed. Exit 1 when the loop did not close.",
        "warpwatch demo --fault data_stall",
    )
    command.add_argument(
        "--fault",
        choices=[*FAULTS],
        nargs="+",
        help="only these; without it all, one after another (on several nodes: a slow rank)",
    )
    command.add_argument(
        "--nodes",
        type=int,
        choices=range(1, MAX_NODES + 1),
        default=1,
        metavar="N",
        help="a training over so many agents on this machine, and a fleet that watches them",
    )
    command.add_argument("--once", action="store_true", help="end after the last fault")
    command.add_argument(
        "--listen", default="127.0.0.1:9400", help="web page (default %(default)s); port 0: any"
    )
    command.add_argument("--store", type=Path, help="keep the captures in this folder")
    command_line.add_json(command)
    arguments = command.parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        raise WarpwatchError("the demo trains with torch: install the extra warpwatch[demo]")
    # Ended from outside, it stops what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    over_nodes = arguments.nodes > 1
    names = arguments.fault or (["slow_rank"] if over_nodes else [*FAULTS])
    faults = [FAULTS[name] for name in names]
    with (
        DemoNodes(arguments.listen, arguments.store, arguments.nodes)
        if over_nodes
        else DemoProcesses(arguments.listen, arguments.store)
    ) as processes:
        endings = _run(processes, faults)
        if arguments.json:
            runs = [ending.to_json() for ending in endings]
            say(json.dumps(runs[0] if len(runs) == 1 else {"runs": runs}))
        if not arguments.once:
            _stay(processes)
    return 0 if all(ending.closed for ending in endings) else 1


def _run(processes: DemoProcesses, faults: list[DemoFault]) -> list[Ending]:
    begun = time.monotonic()

    def progress(text: str) -> None:
        say(f"[{time.monotonic() - begun:6.1f} s] {text}", sys.stderr)

    processes.start_daemon()
    progress(f"{processes.watcher} with simulated GPUs; the page: {processes.link()}")
    endings = []
    for fault in faults:
        processes.start_training()
        try:
            endings.append(Story(processes, progress).run(fault))
        except WarpwatchError as error:
            progress(str(error))
            endings.append(Ending(fault.name))
        if fault is not faults[-1]:
            processes.stop_training()
    if processes.has_captured:
        progress(f"the captures stay in {processes.store}")
    return endings


def _stay(processes: DemoProcesses) -> None:
    fleet = " --fleet" if processes.watcher == "fleet" else ""
    say(f"the page until Ctrl-C, valid for a minute: {processes.link()}", sys.stderr)
    say(f"another link: WARPWATCH_DIR={processes.work}/run warpwatch page{fleet}", sys.stderr)
    while True:
        processes.check_training()
        time.sleep(1)
