"""What the shim costs the training thread per step on this machine, in microseconds.

``limit_us`` is a loop of two clock reads and one record (a step with two phases) written by the
protocol's own codec into a mapped ring; ``ratio`` is the shim with the same record over it.
``command_look_us`` is what a step pays besides when 5 ms have passed since the last look at
the command file. The loops run in turns, each of which adds up its own steps; each figure is the
median of its turns.
"""

from __future__ import annotations

import mmap
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import warpwatch
from warpwatch import protocol
from warpwatch.monitor import Monitor
from warpwatch.steps import StepClock

TURNS = 15
STEPS = 4000
LIMITS = {"step_with_phases_us": 10.0, "ratio": 5.0}

HOLD_LOCK = """
import fcntl, sys
lock = open(sys.argv[1], "r+b")
fcntl.lockf(lock, fcntl.LOCK_EX, 1, 0)
print("held", flush=True)
sys.stdin.read()
"""


def limit_loop(ring: mmap.mmap) -> Callable[[int], None]:
    words = memoryview(ring).cast("Q")
    two = struct.Struct("<QQ")

    def run(steps: int) -> None:
        clock = time.monotonic_ns
        for step in range(steps):
            begin = clock()
            end = clock()
            payload = protocol.STEP.pack(step, end - begin, 0, 0, 32, 4096) + two.pack(begin, end)
            record = protocol.encode_record(step + 1, protocol.RECORD_STEP, 0, end, payload)
            offset = protocol.record_offset(step + 1)
            ring[offset : offset + len(record)] = record
            words[protocol.WORD_RECORDS] = step + 1

    return run


def bare_loop(steps: int) -> None:
    clock = time.monotonic_ns
    for _ in range(steps):
        clock()
        clock()


def step_loop(monitor: Monitor) -> Callable[[int], None]:
    def run(steps: int) -> None:
        for _ in range(steps):
            with monitor.step(samples=32, tokens=4096):
                pass
        monitor.clock.settle()

    return run


def phases_loop(monitor: Monitor) -> Callable[[int], None]:
    def run(steps: int) -> None:
        for _ in range(steps):
            with monitor.step(samples=32, tokens=4096):
                with monitor.phase("forward"):
                    pass
                with monitor.phase("backward"):
                    pass
        monitor.clock.settle()

    return run


def command_loop(fd: int) -> Callable[[int], None]:
    def run(steps: int) -> None:
        for _ in range(steps):
            os.pread(fd, 8, protocol.COMMAND_SEQUENCE_OFFSET)

    return run


def in_turns(loops: dict[str, Callable[[int], None]]) -> dict[str, float]:
    """Median microseconds per step of each loop, run in turns so that all see the same machine."""
    turns: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(TURNS):
        for name, loop in loops.items():
            begin = time.perf_counter()
            loop(STEPS)
            turns[name].append((time.perf_counter() - begin) / STEPS * 1e6)
    return {name: statistics.median(times) for name, times in turns.items()}


def rendezvous_folder(path: Path) -> None:
    for name in ("ranks", "commands", "inbox"):
        (path / name).mkdir()
    (path / "daemon.lock").touch()


def attached_monitor(path: Path) -> Monitor:
    """The process's monitor with ring and command file, as beside a daemon."""
    os.environ.update(WARPWATCH_DIR=str(path), WARPWATCH_ATTACH_INTERVAL_S="0.05")
    monitor = warpwatch.attach(job="benchmark")
    deadline = time.monotonic() + 10
    while monitor.clock.ring is None or monitor.clock.ring.command_fd < 0:
        if time.monotonic() > deadline:
            raise SystemExit("the shim found no daemon")
        with monitor.step():
            time.sleep(0.01)
        for ring in (path / "ranks").glob("*.ring"):
            command = path / "commands" / f"{ring.stem}.cmd"
            if not command.exists():
                command.write_bytes(protocol.encode_command(0, {}))
    return monitor


def measure() -> dict[str, object]:
    """The figures; the process has a monitor attached to a folder of its own from then on."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        rendezvous_folder(path)
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD_LOCK, str(path / "daemon.lock")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            return report(attached_monitor(path))
        finally:
            holder.communicate()
            del os.environ["WARPWATCH_DIR"], os.environ["WARPWATCH_ATTACH_INTERVAL_S"]


def report(monitor: Monitor) -> dict[str, object]:
    alone = Monitor(StepClock())
    ring = monitor.clock.ring
    assert ring is not None
    times = in_turns(
        {
            "limit_us": limit_loop(mmap.mmap(-1, protocol.RING_SIZE)),
            "bare_us": bare_loop,
            "step_us": step_loop(monitor),
            "step_with_phases_us": phases_loop(monitor),
            "no_daemon_us": phases_loop(alone),
            "command_look_us": command_loop(ring.command_fd),
        }
    )
    ratio = times["step_with_phases_us"] / times["limit_us"]
    rounded = {key: round(value, 3) for key, value in times.items()}
    return {**rounded, "ratio": round(ratio, 2), "limits": LIMITS}
