"""Steps one device of the nvml source under a fake driver, round by round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.devices.fakenvml.driver import FakeDriver

PROCESS = Path(__file__).with_name("nvml_process.py")
# The fake driver reads its settings again at most that late.
SETTLING_S = 0.05


class Stepper:
    """A device at index 0. Rounds follow each other without a pause."""

    def __init__(self, process: subprocess.Popen[str], driver: FakeDriver) -> None:
        self._process = process
        self._driver = driver
        self._newest: dict[str, Any] = {}
        self._calls_before: dict[str, int] = {}

    def begin(self, profile: str, **settings: float | str) -> FakeDriver:
        """Forget all that was: a new device, on a driver with these settings and no faults."""
        self._driver.clear()
        self._driver.set(None, profile=profile, **settings)
        self._settle()
        self._calls_before = self._driver.calls().get(0, {})
        self._tell("new")
        return self._driver

    def calls(self, function: str = "") -> int:
        """How often a function, or any, was called on the device."""
        now = self._driver.calls()[0]
        names = [function] if function else list(now)
        return sum(now.get(name, 0) - self._calls_before.get(name, 0) for name in names)

    def _settle(self) -> None:
        """Wait until the driver knows what was set last."""
        age_s = time.time() - self._driver.control_file.stat().st_mtime
        time.sleep(max(0.0, SETTLING_S - age_s))

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def step(self, rounds: int = 1) -> dict[str, float]:
        """The values of the GPU after so many rounds more."""
        assert self._process.stdout is not None
        self._settle()
        self._tell(str(rounds))
        self._newest = json.loads(self._process.stdout.readline())
        values: dict[str, float] = self.gpu["values"]
        return values

    @property
    def gpu(self) -> dict[str, Any]:
        gpus = [d for d in self._newest["devices"].values() if not d["gpu_instance"]]
        assert len(gpus) == 1
        gpu: dict[str, Any] = gpus[0]
        return gpu

    @property
    def instances(self) -> dict[str, dict[str, Any]]:
        """The MIG devices by their UUID."""
        return {u: d for u, d in self._newest["devices"].items() if d["gpu_instance"]}

    @property
    def forgotten(self) -> list[str]:
        forgotten: list[str] = self._newest["forgotten"]
        return forgotten

    @property
    def counts(self) -> dict[str, float]:
        counts: dict[str, float] = self._newest["counts"]
        return counts


@contextmanager
def stepping(driver: FakeDriver) -> Iterator[Stepper]:
    process = subprocess.Popen(
        [sys.executable, str(PROCESS), "device"],
        env=os.environ | driver.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Stepper(process, driver)
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait(10)
