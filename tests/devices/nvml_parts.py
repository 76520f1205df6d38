"""Runs ``nvml_parts_process`` under a fake driver and follows what it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.devices.fakenvml.driver import FakeDriver
from tests.devices.recording import wait_until

ROOT = Path(__file__).parents[2]


class PartsProcess:
    """``state``: the newest report."""

    def __init__(self, driver: FakeDriver, options: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "tests.devices.nvml_parts_process", json.dumps(options)]
        environment = {**os.environ, **driver.environment}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self.state: dict[str, Any] = {}
        self.log = ""
        self._threads = [
            threading.Thread(target=self._read_states),
            threading.Thread(target=self._read_log),
        ]
        for thread in self._threads:
            thread.start()

    def until(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The first report seen that meets the condition. Raises TimeoutError."""
        met: list[dict[str, Any]] = []

        def check() -> bool:
            state = self.state
            if state and condition(state):
                met.append(state)
            elif self.process.poll() is not None:
                raise AssertionError(f"the process ended: {self.log}")
            return bool(met)

        try:
            wait_until(check)
        except TimeoutError:
            raise TimeoutError(f"last: {self.state}\n{self.log}") from None
        return met[0]

    def tell(self, command: str, uuid: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {uuid}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """End it in order; what it logged is in ``log`` then."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)
        for thread in self._threads:
            thread.join()
        assert self.process.stdout is not None and self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()

    def _read_states(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.state = json.loads(line)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line


@contextmanager
def running(driver: FakeDriver, **options: Any) -> Iterator[PartsProcess]:
    parts = PartsProcess(driver, options)
    try:
        yield parts
    except BaseException:
        parts.process.kill()
        raise
    finally:
        parts.close()
