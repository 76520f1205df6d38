"""What a capture is called: when it was asked for, and what nobody can foretell."""

from __future__ import annotations

import re
import secrets
import time

# Of a capture over nodes a second and a third try have a name of their own on each node.
PATTERN = r"^\d{8}T\d{6}-[0-9a-f]{6}(-[23])?$"
_TRY = re.compile(r"-[23]$")


def new(now: float) -> str:
    """``now``: wall clock in seconds."""
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + "-" + secrets.token_hex(3)


def place(capture_id: str) -> str:
    """Of a capture over nodes in a remote store: all nodes find the same, whatever their clocks."""
    name = base(capture_id)
    return f"{name[:4]}/{name[4:6]}/{name[6:8]}/{name}"


def base(capture_id: str) -> str:
    """What the capture over nodes is called that it is a try of."""
    return _TRY.sub("", capture_id)
