"""Runs calls that may never return in threads, and waits for them only for a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

# One ``run_all`` may leave this many threads behind.
MAX_THREADS = 64


def run_all(works: Mapping[str, Callable[[], object]], timeout_s: float | None = None) -> None:
    """Run each work in a thread of its name, and wait for all of them until the time-out.

    A thread that has not returned then goes on, but does not keep the process alive. Raises
    ValueError for more than MAX_THREADS.
    """
    if len(works) > MAX_THREADS:
        raise ValueError(f"{len(works)} threads, at most {MAX_THREADS}")
    threads = [
        threading.Thread(target=work, name=f"ww-{name}", daemon=True)
        for name, work in works.items()
    ]
    for thread in threads:
        thread.start()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for thread in threads:
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
