"""Waits for an event in another process or thread, with a deadline that only a hang reaches."""

import socket
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

# Minutes on a machine that is busy with other work are normal; a hang is what takes longer.
DEADLINE_S = 300.0
POLL_S = 0.02


def eventually(
    find: Callable[[], Found | None], what: object = "it did not happen", poll_s: float = POLL_S
) -> Found:
    """Return the first true result of ``find``.

    Raises AssertionError after ``DEADLINE_S`` with the text ``what``, or the text it returns if it
    is callable.
    """
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        found = find()
        if found:
            return found
        time.sleep(poll_s)
    raise AssertionError(what() if callable(what) else what)


def is_listening(port: int) -> bool:
    """Return whether a server accepts connections at this port of loopback."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
