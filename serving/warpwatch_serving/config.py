"""The section `http`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator

from warpwatch_telemetry.sections import Boolean, Section, Url

# The last colon is before the port. IPv6 also without brackets, as $(POD_IP):9400 has it.
_LISTEN = re.compile(
    r"(\[[0-9A-Fa-f:]+\]|([0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{1,4}|[^:\s]*):\d{1,5}"
)


def _listen(value: str) -> str:
    if not _LISTEN.fullmatch(value):
        raise ValueError("an address and a port are needed, such as 127.0.0.1:9400")
    if int(value.rpartition(":")[2]) > 65535:
        raise ValueError("a port is at most 65535")
    return value


Listen = Annotated[str, AfterValidator(_listen)]


def url_of(listen: str) -> str:
    """Return the URL at which this machine reaches a server that listens there."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if host in ("", "0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpConfig(Section):
    """``public_url``: the base of links to this daemon; without it there are none.

    ``section``: its name in the file. ``metrics_token``: whether ``/metrics`` needs the token too.
    ``probe_listen``: an address for probes only.
    """

    section: ClassVar[str] = "http"

    listen: Listen = "127.0.0.1:9400"
    web_config: Path | None = None
    token_file: Path | None = None
    metrics_token: Boolean = False
    probe_listen: Listen | None = None
    public_url: Url | None = None

    def public_url_of(self, node: str) -> str:
        """Return the base of links to this daemon, empty if there is none."""
        return (self.public_url or "").replace("{node}", node)
