"""Defines the stream and the buckets of a fleet, and creates them.

The messages to JetStream's own interface are written here: the library's configuration has fields
that servers of 2.9 do not know.
"""

from __future__ import annotations

import json
from typing import Any

from warpwatch_runtime.bus import Bus, BusError
from warpwatch_serving.access import SESSION_S
from warpwatch_telemetry.bus_messages import MAX_MESSAGE_BYTES, NODES, RECORDS, STREAM

LEASES = "warpwatch-leases"
STATES = "warpwatch-state"
SESSIONS = "warpwatch-sessions"
LEASE_S = 15.0
# A later worker starts with the records of this time.
RECORDS_S = 600.0
# A state that was not written for this time is useless: its records are removed.
STATE_S = 86400.0
MAX_RECORDS_BYTES = 8 * 2**30
MAX_STATE_BYTES = 2 * 2**30

_NS = 10**9


def _stream(name: str, subjects: list[str], age_s: float, max_bytes: int) -> dict[str, Any]:
    return {
        "name": name,
        "subjects": subjects,
        "retention": "limits",
        "storage": "file",
        "max_age": int(age_s * _NS),
        "max_bytes": max_bytes,
        "max_msg_size": 2 * MAX_MESSAGE_BYTES,
        "max_msgs": -1,
        "max_consumers": -1,
        "duplicate_window": int(min(age_s, 120.0) * _NS),
        "allow_direct": True,
    }


def _bucket(name: str, age_s: float, max_bytes: int) -> dict[str, Any]:
    """Return the stream that is a bucket of keys with one value each."""
    about = {"discard": "new", "max_msgs_per_subject": 1, "allow_rollup_hdrs": True}
    return _stream(f"KV_{name}", [f"$KV.{name}.>"], age_s, max_bytes) | about


DEFINITIONS: tuple[dict[str, Any], ...] = (
    _stream(STREAM, [f"{RECORDS}.>", f"{NODES}.>"], RECORDS_S, MAX_RECORDS_BYTES)
    | {"discard": "old", "max_msgs_per_subject": -1},
    _bucket(LEASES, LEASE_S, 2**20),
    _bucket(STATES, STATE_S, MAX_STATE_BYTES),
    # About 5,000 sessions; for one more, the oldest goes.
    _bucket(SESSIONS, SESSION_S, 2**20) | {"discard": "old"},
)


async def create(bus: Bus, replicas: int = 1) -> None:
    """Create what is missing, and change what differs. Raises BusError."""
    for definition in DEFINITIONS:
        wanted = json.dumps(definition | {"num_replicas": replicas}).encode()
        for verb in ("CREATE", "UPDATE"):
            reply = await bus.request(f"$JS.API.STREAM.{verb}.{definition['name']}", wanted)
            error = json.loads(reply).get("error")
            # Another definition has this name.
            if error is None or (verb, error.get("err_code")) != ("CREATE", 10058):
                break
        if error is not None:
            raise BusError(f"{definition['name']}: {error.get('description')}")
