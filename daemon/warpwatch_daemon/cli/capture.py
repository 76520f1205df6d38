"""`warpwatch capture`: ask for a profile of a running job."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.cli import parsing
from warpwatch_runtime import command_line
from warpwatch_runtime.command_line import ProgressLines, say
from warpwatch_serving.page import captures as page
from warpwatch_telemetry.captures import CAPTURE_KINDS, CAPTURE_OPTIONS, RANK_STATES, Capture
from warpwatch_telemetry.errors import Refused, UsageError, WarpwatchError

POLL_S = 0.5
_WRITTEN = RANK_STATES.index("written")


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    api = parsing.api(arguments)
    body = {
        "job": arguments.job or only_job(api),
        "owner": arguments.owner,
        "run": run_of(api, arguments.replica) if arguments.replica else "",
        "ranks": arguments.rank,
        "kind": arguments.kind,
        "steps": arguments.steps,
        "options": arguments.options,
        "reason": "asked for on the command line",
    }
    capture = api.post("/api/v1/captures", body)
    if arguments.wait:
        capture = wait(api, capture["id"], arguments.timeout)
    if arguments.json:
        say(json.dumps(capture, indent=1))
    else:
        say("\n".join(describe(msgspec.convert(capture, Capture), api.shown_url)))
    if str(capture["outcome"]).startswith("refused_"):
        return Refused.exit_code
    return 1 if capture["outcome"] in ("partial", "failed") else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    command = command_line.parser(
        "capture",
        "Profile a running job: the same steps on all its ranks of this node. Exit 1 when a "
        "rank brought nothing, 3 when the capture was refused.",
        "warpwatch capture --job llama-7b --steps 5 --wait",
    )
    command.add_argument("--job", help="the job; not needed when there is only one")
    command.add_argument(
        "--owner", default="", help="whose, as ns/team or uid/1000, where several have such a job"
    )
    command.add_argument("--replica", help="of an inference server, as `warpwatch status` names it")
    command.add_argument("--rank", type=int, action="append", help="only this rank (repeatable)")
    command.add_argument("--kind", default="torch", choices=CAPTURE_KINDS)
    command.add_argument(
        "--steps",
        type=_steps,
        default=5,
        metavar="1-100",
        help="steps to record (default 5)",
    )
    command.add_argument(
        "--with",
        dest="options",
        action="append",
        default=[],
        choices=CAPTURE_OPTIONS,
        help="record this as well, at a price (kind torch; repeatable)",
    )
    command.add_argument("--wait", action="store_true", help="wait for the diagnosis")
    command.add_argument("--timeout", type=float, default=300, help="seconds to wait (default 300)")
    parsing.add_daemon(command)
    command_line.add_json(command)
    return command.parse_args(argv)


def _steps(text: str) -> int:
    """Return the number of steps. Raises ArgumentTypeError; ``choices`` would list all hundred."""
    if text.isdecimal() and 1 <= int(text) <= 100:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 100")


def only_job(api: ApiClient) -> str:
    """Return the name of the only job with live ranks. Raises Refused or UsageError."""
    ranks = api.get("/api/v1/ranks")["ranks"]
    names = sorted({str(rank["job"]) for rank in ranks if rank["status"] in ("running", "stopped")})
    if len(names) == 1:
        return names[0]
    if not names:
        raise Refused("refused_no_rank", "no running job reports to this daemon")
    raise UsageError(f"name the job with --job; there are {', '.join(names)}")


def run_of(api: ApiClient, replica: str) -> str:
    """Return the run of a server's replica. Raises Refused."""
    ranks = [rank for rank in api.get("/api/v1/ranks")["ranks"] if rank["serve"]]
    runs = {str(rank["run"]) for rank in ranks if rank["serve"]["replica"] == replica}
    if len(runs) != 1:
        known = ", ".join(sorted({str(rank["serve"]["replica"]) for rank in ranks})) or "none"
        raise Refused("refused_no_rank", f"no replica {replica!r} is known; replicas: {known}")
    return runs.pop()


def wait(
    api: ApiClient,
    capture_id: str,
    timeout_s: float,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """Return the capture once it has an outcome. Raises WarpwatchError at the time-out."""
    deadline, shown = monotonic() + timeout_s, ProgressLines()
    while monotonic() < deadline:
        capture = api.get(f"/api/v1/captures/{capture_id}")
        if capture["outcome"] is not None:
            return capture
        for rank in capture["ranks"]:
            node = f" on {rank['node']}" if rank["node"] else ""
            done = min(RANK_STATES.index(rank["state"]), _WRITTEN)
            shown.show(f"rank {rank['rank']}{node}", done, _WRITTEN, rank["state"])
        sleep(POLL_S)
    raise WarpwatchError(f"capture {capture_id} has no outcome after {timeout_s:.0f} s")


def describe(capture: Capture, url: str) -> Iterator[str]:
    """Yield the outcome, each rank, the facts, the verdict and the addresses of reports."""
    yield f"capture {capture.id}: {page.outcome(capture)}"
    for rank in capture.ranks:
        why = "; ".join(filter(None, [rank.detail, *rank.problems]))
        where = f" on {rank.node}" if rank.node else ""
        yield f"  rank {rank.rank}{where}: {rank.state}{f' ({why})' if why else ''}"
    yield from (f"  {name}: {fact}" for name, fact in page.facts(capture))
    if capture.diagnosis is not None:
        yield f"  verdict: {': '.join(filter(None, page.describe(capture)))}"
    for name in capture.files:
        if name.endswith((".html", ".stacks.json")):
            yield f"  {url}/api/v1/captures/{capture.id}/{name}"
