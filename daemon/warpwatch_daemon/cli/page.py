"""`warpwatch page`: open the web page as the user who asks."""

from __future__ import annotations

import json
import os
import webbrowser
from collections.abc import Mapping, Sequence
from typing import Any

from warpwatch_daemon.api_client import FLEET, ApiClient, find_socket, is_address
from warpwatch_daemon.cli import parsing
from warpwatch_runtime import command_line
from warpwatch_runtime.command_line import say
from warpwatch_telemetry.errors import UsageError, WarpwatchError


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    command = command_line.parser(
        "page",
        "Print a link to the web page, valid once and for a minute, and open a browser where there "
        "is one. The page then shows for 12 hours what the user of this command may see.",
        "warpwatch page --base http://localhost:9400",
    )
    parsing.add_daemon(command)
    command.add_argument(
        "--base",
        metavar="URL",
        help="the address under which your browser reaches the port, such as that of `ssh -L` or "
        "`kubectl port-forward`",
    )
    command.add_argument(
        "--fleet", action="store_true", help="the fleet of this machine, not the daemon"
    )
    command_line.add_json(command)
    arguments = command.parse_args(argv)
    if arguments.base and not is_address(arguments.base):
        raise UsageError(f"--base {arguments.base!r} is not an http:// or https:// address")
    link = _client(arguments, environ).post("/api/v1/sessions", {})
    # --url and WARPWATCH_URL are the daemon's.
    url = None if arguments.fleet else arguments.url
    base = arguments.base or url or link["url"]
    if not base:
        key = "fleet.listen" if arguments.fleet else "http.listen"
        raise WarpwatchError(f"{key} is not served, see the log; or name --base URL")
    url = base.rstrip("/") + link["path"]
    say(json.dumps({"url": url, "seconds": link["seconds"]}) if arguments.json else url)
    has_screen = any(environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if has_screen and not (arguments.json or arguments.base):
        webbrowser.open(url)
    return 0


def _client(arguments: Any, environ: Mapping[str, str]) -> ApiClient:
    if not arguments.fleet:
        return parsing.api(arguments, environ)
    found = find_socket(environ, os.getuid(), FLEET)
    if found is None:
        raise UsageError("no fleet serves a socket on this machine; run this where it runs")
    return ApiClient(socket_path=found)
