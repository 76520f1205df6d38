"""`warpwatch capture`: ask for a profile of a running job."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.cli import parsing
from warpwatch_daemon.cli.progress import Progress
from warpwatch_runtime import command_line
from warpwatch_runtime.command_line import say
from warpwatch_telemetry.captures import CAPTURE_KINDS, CAPTURE_OPTIONS, RANK_STATES
from warpwatch_telemetry.errors import Refused, UsageError, WarpwatchError

POLL_S = 0.5
_WRITTEN = RANK_STATES.index("written")


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    api = parsing.api(arguments)
    body = {
        "job": arguments.job or _only_job(api),
        "owner": arguments.owner,
        "ranks": arguments.rank,
        "kind": arguments.kind,
        "steps": arguments.steps,
        "options": arguments.options,
        "reason": "asked for on the command line",
    }
    capture = api.post("/api/v1/captures", body)
    if arguments.wait:
        capture = wait(api, capture["id"], arguments.timeout)
    say(json.dumps(capture, indent=1) if arguments.json else describe(capture, api.shown_url))
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
    command.add_argument("--rank", type=int, action="append", help="only this rank (repeatable)")
    command.add_argument("--kind", default="torch", choices=CAPTURE_KINDS)
    command.add_argument(
        "--steps",
        type=int,
        default=5,
        choices=range(1, 101),
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


def _only_job(api: ApiClient) -> str:
    ranks = api.get("/api/v1/ranks")["ranks"]
    names = sorted({str(rank["job"]) for rank in ranks if rank["status"] == "running"})
    if len(names) == 1:
        return names[0]
    if not names:
        raise Refused("refused_no_rank", "no running job reports to this daemon")
    raise UsageError(f"name the job with --job; there are {', '.join(names)}")


def wait(
    api: ApiClient,
    capture_id: str,
    timeout_s: float,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """Return the capture once it has an outcome. Raises WarpwatchError at the time-out."""
    deadline, shown = monotonic() + timeout_s, Progress()
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


def describe(capture: Any, url: str) -> str:
    lines = [f"capture {capture['id']}: {outcome_of(capture)}"]
    for rank in capture["ranks"]:
        why = "; ".join(filter(None, [rank["detail"], *rank["problems"]]))
        where = f" on {rank['node']}" if rank["node"] else ""
        lines.append(f"  rank {rank['rank']}{where}: {rank['state']}{f' ({why})' if why else ''}")
    asked, steps = capture["request"]["steps"], capture["steps"]
    if steps is not None and steps < asked:
        lines.append(f"  {steps} of {asked} steps: more cost too much")
    lines += [f"  {line}" for line in _price(capture)]
    diagnosis = capture["diagnosis"]
    if diagnosis:
        lines.append(f"  verdict: {diagnosis['verdict']}: {diagnosis.get('summary', '')}")
    shown = [name for name in capture["files"] if name.endswith((".html", ".stacks.json"))]
    lines += [f"  {url}/api/v1/captures/{capture['id']}/{name}" for name in shown]
    return "\n".join(lines)


def outcome_of(capture: Any) -> str:
    """Return the outcome with ranks, such as ``complete 2/2, verified``."""
    if capture["outcome"] is None:
        return "begun"
    ranks = capture["ranks"]
    count = f"{sum(rank['state'] == 'written' for rank in ranks)}/{len(ranks)}"
    unverified = sum(rank["verified"] is False for rank in ranks)
    read = any(rank["verified"] is not None for rank in ranks)
    verified = f", {unverified} not verified" if unverified else ", verified" if read else ""
    return f"{capture['outcome']} {count}{verified}"


def _price(capture: Any) -> list[str]:
    """Return the cost and lasting effect, known only some steps after the capture."""
    said = []
    cost_s, expected_s = capture["cost_s"], capture.get("expected_cost_s")
    expected = "" if expected_s is None else f"{expected_s:.2f} s expected"
    if cost_s is not None:
        said.append(f"cost: {cost_s:.2f} s of training{', ' if expected else ''}{expected}")
    elif expected:
        said.append(f"cost: {expected}")
    residual = capture["residual"]
    if residual is not None:
        slower = "the job is slower since" if residual["slower"] else "no more than its noise"
        said.append(
            f"step after / before: {residual['ratio']:.3f} over {residual['steps']} steps; {slower}"
        )
    return said
