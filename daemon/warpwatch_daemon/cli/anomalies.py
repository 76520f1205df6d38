"""`warpwatch anomalies`: list what is wrong now; end what needs service."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.cli import parsing
from warpwatch_runtime import command_line
from warpwatch_runtime.quantities import text
from warpwatch_telemetry.errors import Refused

# Cause, place and owner fit; the page has more.
MAX_CHARS = 400


def main(argv: Sequence[str]) -> int:
    command = command_line.parser(
        "anomalies",
        "List the active anomalies of a running daemon. `resolve ID` ends a device_needs_service: "
        "the GPU was served in a way that the driver does not show, or it has left the node. That "
        "needs root, or the token, and is logged.",
        "sudo warpwatch anomalies resolve 6553f182-1",
    )
    command.add_argument("resolve", nargs="*", metavar="resolve ID", help="the anomaly to end")
    parsing.add_daemon(command)
    command_line.add_json(command)
    arguments = command.parse_intermixed_args(argv)
    if arguments.resolve and (len(arguments.resolve) != 2 or arguments.resolve[0] != "resolve"):
        command.error("expected nothing, or: resolve ID")
    api = parsing.api(arguments)
    if arguments.resolve:
        answer = _resolve(api, arguments.resolve[1])
        lines = [text(answer["summary"], MAX_CHARS)]
    else:
        answer = api.get("/api/v1/anomalies?active=true")
        lines = [
            f"{one['id']}  {one['severity']}  {text(one['sentence'], MAX_CHARS)}"
            for one in answer["anomalies"]
        ] or ["no anomaly is active"]
    command_line.say(json.dumps(answer, indent=1) if arguments.json else "\n".join(lines))
    return 0


def _resolve(api: ApiClient, ident: str) -> Any:
    """Resolve the anomaly. Raises Refused with the node to do it on, if it is not this daemon's.

    A fleet has no such request. Its IDs of the agents' anomalies end with the name of the node.
    """
    try:
        return api.post(f"/api/v1/anomalies/{quote(ident, safe='')}/resolve", {})
    except Refused as error:
        if error.reason != "not_found":
            raise
        own, _, node = ident.partition("@")
        said = (
            f"{ident} is not an active anomaly of an agent at {api.where}; on "
            f"{node or 'the node of the GPU'} run: sudo warpwatch anomalies resolve {own}"
        )
        raise Refused(error.reason, said) from error
