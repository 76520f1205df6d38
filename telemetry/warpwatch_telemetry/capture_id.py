"""Makes ids of captures: the time of the request, and random digits."""

from __future__ import annotations

import hashlib
import re
import secrets
import time

# The second and third try of a multi-node capture have names of their own on each node.
PATTERN = r"^\d{8}T\d{6}-[0-9a-f]{6}(-[23])?$"
_TRY = re.compile(r"-[23]$")


def new(now: float) -> str:
    """Return a new id. ``now``: wall clock in seconds."""
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + "-" + secrets.token_hex(3)


def of_anomaly(anomaly_id: str, number: int, now: float) -> str:
    """Return the id of an anomaly's capture, the same for every requester.

    number: the count of its earlier captures. The ids of a fleet's anomalies begin with their time.
    """
    at = int(anomaly_id[:8], 16) if re.match(r"[0-9a-f]{8}-", anomaly_id) else now
    digest = hashlib.sha256(f"{anomaly_id}#{number}".encode()).hexdigest()[:6]
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(at)) + f"-{digest}"


def place(capture_id: str) -> str:
    """Return the path in a remote store, the same on all nodes of a capture."""
    name = base(capture_id)
    return f"{name[:4]}/{name[4:6]}/{name[6:8]}/{name}"


def base(capture_id: str) -> str:
    """Return the id of the multi-node capture that this id is a try of."""
    return _TRY.sub("", capture_id)
