"""The nvml source in a process of its own: the loader's library, threads, and calls that hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from tests.devices.fakenvml.driver import LIBRARY, FakeDriver
from tests.devices.nvml_by_hand import uuid
from tests.waiting import DEADLINE_S, eventually

ROOT = Path(__file__).parents[2]


class Watched:
    """What the process has said last: by name whether it is up, why not, and its index."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.newest: dict[str, tuple[bool, str, int]] = {}
        self.told = dict.fromkeys(map(uuid, range(8)), 0)
        self.counting: set[str] = set()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.devices.nvml_process"],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            name, up, reason, index, counting = json.loads(line)
            self.newest[name] = (up, reason, index)
            self.told[name] = self.told.get(name, 0) + 1
            if counting:
                self.counting.add(name)

    def up(self) -> set[int]:
        return {gpu for gpu in range(8) if self.newest.get(uuid(gpu), (False,))[0]}

    def reason(self, name: str) -> str:
        return self.newest.get(name, (False, "", 0))[1]

    def end(self) -> int:
        """End its input; its exit status."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self._reader.join(DEADLINE_S)
        self.process.stdout.close()
        return self.process.wait(DEADLINE_S)


def test_a_driver_that_comes_late_a_stuck_call_and_a_removed_gpu_cost_the_others_nothing(
    fake_driver: FakeDriver, tmp_path: Path
) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    watched = Watched(fake_driver.environment | {"LD_LIBRARY_PATH": str(folder)})
    try:
        eventually(lambda: watched.reason("nvml"))
        missing = "libnvidia-ml.so.1 not found: install the NVIDIA driver"
        assert watched.reason("nvml").startswith(missing)
        (folder / LIBRARY).symlink_to(fake_driver.library / LIBRARY)
        eventually(lambda: watched.up() == set(range(8)))
        eventually(lambda: len(watched.counting) == 8)
        fake_driver.hang(gpu=5)
        fake_driver.set(3, absent=1)
        eventually(lambda: watched.reason(uuid(5)) == "stuck")
        eventually(lambda: watched.reason(uuid(3)) == "lost")
        eventually(lambda: watched.up() == {0, 1, 2, 4, 6, 7})
        before = dict(watched.told)
        eventually(lambda: all(watched.told[uuid(gpu)] > before[uuid(gpu)] + 3 for gpu in (0, 7)))
        eventually(lambda: watched.newest[uuid(7)][2] == 6)
        # It ends in order while the call is inside.
        assert watched.end() == 0
        assert watched.newest["closed"][0]
    finally:
        watched.process.kill()
        watched.end()
