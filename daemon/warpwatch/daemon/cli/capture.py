"""`warpwatch capture`: ask the daemon for a profile of a running job."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from warpwatch.daemon.api_client import ApiClient
from warpwatch.daemon.cli import parsing
from warpwatch.daemon.errors import Refused, UsageError, WarpwatchError

POLL_S = 0.5


def main(argv: Sequence[str]) -> int:
    command = parsing.parser(
        "capture",
        "Profile a running job: the same steps on all its ranks of this node. Exit 1 when a "
        "rank brought nothing, 3 when the capture was refused.",
        "warpwatch capture --job llama-7b --steps 5 --wait",
    )
    command.add_argument("--job", help="the job; not needed when there is only one")
    command.add_argument("--rank", type=int, action="append", help="only this rank (repeatable)")
    command.add_argument("--kind", default="torch", choices=["torch", "stacks"])
    command.add_argument(
        "--steps",
        type=int,
        default=5,
        choices=range(1, 101),
        metavar="1-100",
        help="steps to record (default 5)",
    )
    command.add_argument("--wait", action="store_true", help="wait for the diagnosis")
    command.add_argument("--timeout", type=float, default=300, help="seconds to wait (default 300)")
    parsing.add_daemon(command)
    parsing.add_json(command)
    arguments = command.parse_args(argv)
    api = parsing.api(arguments)
    body = {
        "job": arguments.job or _only_job(api),
        "ranks": arguments.rank,
        "kind": arguments.kind,
        "steps": arguments.steps,
        "reason": "asked for on the command line",
    }
    capture = api.post("/api/v1/captures", body)
    if arguments.wait:
        capture = wait(api, capture["id"], arguments.timeout)
    print(json.dumps(capture, indent=1) if arguments.json else describe(capture, api.url))
    return 1 if capture["outcome"] in ("partial", "failed") else 0


def _only_job(api: ApiClient) -> str:
    ranks = api.get("/api/v1/ranks")["ranks"]
    names = sorted({str(rank["job"]) for rank in ranks if rank["status"] == "running"})
    if len(names) == 1:
        return names[0]
    if not names:
        raise Refused("refused_no_rank", "no running job reports to this daemon")
    raise UsageError(f"name the job with --job; there are {', '.join(names)}")


def wait(api: ApiClient, capture_id: str, timeout_s: float) -> Any:
    """The capture once it has an outcome. Raises WarpwatchError when that takes too long."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        capture = api.get(f"/api/v1/captures/{capture_id}")
        if capture["outcome"] is not None:
            return capture
        time.sleep(POLL_S)
    raise WarpwatchError(f"capture {capture_id} has no outcome after {timeout_s:.0f} s")


def describe(capture: Any, url: str) -> str:
    lines = [f"capture {capture['id']}: {capture['outcome'] or 'begun'}"]
    for rank in capture["ranks"]:
        detail = f" ({rank['detail']})" if rank["detail"] else ""
        lines.append(f"  rank {rank['rank']}: {rank['state']}{detail}")
    diagnosis = capture["diagnosis"]
    if diagnosis:
        lines.append(f"  verdict: {diagnosis['verdict']}: {diagnosis.get('summary', '')}")
    shown = [name for name in capture["files"] if name.endswith((".html", ".stacks.json"))]
    lines += [f"  {url}/api/v1/captures/{capture['id']}/{name}" for name in shown]
    return "\n".join(lines)
