"""Stacks of a rank that does not answer: by py-spy, else from its pipe, else why not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpwatch import protocol
from warpwatch_daemon.participants import gil_stacks, py_spy
from warpwatch_daemon.ranks import process
from warpwatch_daemon.ranks.rank import Rank
from warpwatch_runtime import files
from warpwatch_runtime.directory import Directory
from warpwatch_telemetry.errors import WarpwatchError

# A rank without a heartbeat is given this long to answer by itself.
ANSWER_S = 3.0
# faulthandler writes 15 s after the last heartbeat; a rank is looked at 5 s after it or later.
WAIT_S = 11.0
# The heart beats every 0.5 s: a step that starts this long after a beat was not blocked by the GIL.
TRAINS_NS = 2_000_000_000
_SAID = {
    process.STOPPED: "the process is stopped",
    process.HOLDS_GIL: "a C call holds the GIL",
    process.UNKNOWN: "the process does not respond",
}


class NoStacks(WarpwatchError):
    """Raised with the reason if there are no stacks."""


@dataclass(frozen=True, slots=True)
class Silent:
    """A rank without a heartbeat.

    reason: one of those in ranks.process.
    """

    job: str
    rank: int
    pid: int
    reason: str
    held_file: str | None
    owner_uid: int


def inspect(rank: Rank, ring_name: str) -> Silent:
    """Return the state of a silent rank. Raises NoStacks if its process has exited."""
    ring = rank.ring
    if not rank.live:
        raise NoStacks("the process is gone")
    try:
        header, holder_pid = ring.reader.header(), ring.reader.holder_pid()
    except (OSError, protocol.ProtocolError) as error:
        raise NoStacks("its ring cannot be read") from error
    said, expected = rank.claims.held_stacks, gil_stacks.file_name(ring_name)
    # Only for threads that stand still: a rank that steps without a heartbeat has a helper thread
    # that is stuck, and its stacks are not read while it runs.
    trains = header.step_begun_ns - header.heartbeat_ns > TRAINS_NS
    return Silent(
        job=rank.job.name,
        rank=rank.rank,
        pid=header.identity.pid,
        reason=process.silent_reason(header.identity, holder_pid, rank.owner_uid),
        held_file=expected if said == expected and not trains else None,
        owner_uid=rank.owner_uid,
    )


def write_stacks(
    silent: Silent,
    inbox: Directory,
    target: Path,
    deadline: float,
    read: Callable[[int, float], list[dict[str, Any]]] = py_spy.dump,
    monotonic: Callable[[], float] = time.monotonic,
) -> str:
    """Write the stacks to ``target``; return the way they were taken. Blocks until ``deadline``.

    deadline: monotonic, in seconds. Raises NoStacks, or OSError when the store is full.
    """
    trouble = "its process is not visible here"
    via, threads = "py-spy", list[dict[str, Any]]()
    if silent.reason != process.UNKNOWN:
        try:
            threads = read(silent.pid, min(py_spy.TIMEOUT_S, deadline - monotonic()))
        except py_spy.PySpyError as error:
            trouble = str(error)
    # A stopped process's timer would end when its threads run again.
    if not threads and silent.held_file is not None and silent.reason == process.HOLDS_GIL:
        via = "faulthandler"
        threads = gil_stacks.read(inbox, silent.held_file, silent.owner_uid, deadline, monotonic)
        trouble = f"{trouble}; faulthandler wrote none"
    if not threads:
        raise NoStacks(f"{_SAID[silent.reason]}: no stacks ({trouble})")
    _write(silent, via, threads, target)
    return via


def _write(silent: Silent, via: str, threads: list[dict[str, Any]], target: Path) -> None:
    content = {
        "rank": silent.rank,
        "job": silent.job,
        "time": time.time(),
        "via": via,
        "silent_reason": silent.reason,
        "threads": threads,
    }
    files.write(target, json.dumps(content).encode())
