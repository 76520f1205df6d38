"""Runs ``nvml_process`` with the nvml source under a fake driver and follows what it publishes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.devices.recording import wait_until

PROCESS = Path(__file__).with_name("nvml_process.py")


def uuid(gpu: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{gpu:012d}"


class Watched:
    """What the source's process has published so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[dict[str, Any]] = []
        self.process = process
        self.log = ""
        self._asked = 0
        self._threads = [
            threading.Thread(target=self._read),
            threading.Thread(target=self._read_log),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line) | {"seen": time.monotonic()})

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def samples(self, device: str) -> list[dict[str, Any]]:
        return [line for line in list(self.lines) if line.get("device") == device]

    def newest(self, gpu: int) -> dict[str, Any]:
        for line in reversed(list(self.lines)):
            if line.get("device") == uuid(gpu):
                return dict(line)
        return {}

    def health(self) -> dict[str, Any]:
        lines = (line for line in reversed(list(self.lines)) if "source" in line)
        return dict(next(lines, {}))

    def up(self) -> set[int]:
        return {gpu for gpu in range(8) if self.newest(gpu).get("up")}

    def failures(self) -> list[str]:
        """Why the source wants the daemon to end."""
        return [line["fail"] for line in list(self.lines) if "fail" in line]

    def all_up(self) -> bool:
        return len(self.up()) == 8

    def reason(self, gpu: int) -> str:
        return str(self.newest(gpu).get("reason", ""))

    def good_times(self, gpu: int, since: float) -> list[float]:
        """When a device was read well, from a wall clock time on."""
        return [s["time"] for s in self.samples(uuid(gpu)) if s["up"] and s["time"] >= since]

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10)

    def run(self, *loops: str) -> None:
        """One round of each, where the loops go round by hand."""
        assert self.process.stdin is not None
        self._asked += len(loops)
        self.process.stdin.write("".join(f"{loop}\n" for loop in loops))
        self.process.stdin.flush()
        wait_until(lambda: sum(set(line) == {"seen"} for line in list(self.lines)) == self._asked)


@contextmanager
def watched(
    environment: dict[str, str], mode: str = "source", **settings: float | bool
) -> Iterator[Watched]:
    """``mode``: ``source``, or ``by_hand`` for a source whose loops the test runs."""
    process = subprocess.Popen(
        [sys.executable, str(PROCESS), mode],
        env=os.environ | environment | {"NVML_PROCESS": json.dumps(settings)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watch = Watched(process)
    try:
        yield watch
        assert process.poll() is None, "the source's process ended by itself"
    finally:
        process.kill()
        process.wait(10)
        watch.join()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
