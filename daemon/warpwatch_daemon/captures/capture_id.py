"""What a capture is called: when it was asked for, and what nobody can foretell."""

from __future__ import annotations

import secrets
import time

# Of a capture over nodes a second and a third try have a name of their own on each node.
PATTERN = r"^\d{8}T\d{6}-[0-9a-f]{6}(-[23])?$"


def new(now: float) -> str:
    """``now``: wall clock in seconds."""
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + "-" + secrets.token_hex(3)
