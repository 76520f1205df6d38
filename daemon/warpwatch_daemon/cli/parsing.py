"""Provides the options of commands that use a daemon, and a client of it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from warpwatch_daemon.api_client import DEFAULT_URL, ApiClient, find_socket, is_url_of


def add_daemon(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url",
        default=os.environ.get("WARPWATCH_URL"),
        help="the daemon (default WARPWATCH_URL, else the one of this machine, which is asked "
        f"through its socket however it is named, else {DEFAULT_URL})",
    )
    command.add_argument(
        "--token-file",
        type=Path,
        # The daemon's own, which is in the environment of its pod.
        default=os.environ.get("WARPWATCH_HTTP__TOKEN_FILE") or None,
        metavar="FILE",
        help="bearer token, where the daemon wants one (default WARPWATCH_HTTP__TOKEN_FILE)",
    )
    command.add_argument(
        "--ca-file",
        type=Path,
        default=os.environ.get("WARPWATCH_CA_FILE") or None,
        metavar="FILE",
        help="who signs its certificate (default WARPWATCH_CA_FILE, else whom the system trusts)",
    )
    command.add_argument(
        "--server-name",
        default=os.environ.get("WARPWATCH_SERVER_NAME", ""),
        metavar="NAME",
        help="whom its certificate is of (default WARPWATCH_SERVER_NAME, else the host of --url)",
    )


def api(
    arguments: argparse.Namespace,
    environ: Mapping[str, str] = os.environ,
    default_url: str = DEFAULT_URL,
) -> ApiClient:
    """Return a client of this machine's daemon by its socket, or of the one of --url."""
    found = find_socket(environ, os.getuid())
    if found is not None and arguments.url and not is_url_of(found, arguments.url):
        found = None
    return ApiClient(
        arguments.url or default_url,
        arguments.token_file,
        ca_file=arguments.ca_file,
        server_name=arguments.server_name,
        socket_path=found,
    )
