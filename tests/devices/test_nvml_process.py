"""The nvml source in a process of its own: the loader's library, threads, and a call that hangs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path

from tests.devices.fakenvml.driver import LIBRARY, FakeDriver
from tests.waiting import DEADLINE_S

# Prints the reason of each GPU that is down whenever they change, until its input ends.
PROGRAM = """
import sys
from tests.devices.recording import RecordingSink
from warpwatch_daemon.agent.supervisor import Supervisor
from warpwatch_devices.config import NvmlConfig
from warpwatch_devices.nvml import device, scanner, source
from warpwatch_devices.source import Surroundings
from warpwatch_devices.xid_ledger import XidLedger

class Sink(RecordingSink):
    told = None
    def publish_device(self, sample):
        super().publish_device(sample)
        with self.lock:
            reasons = {int(uuid[-1]): s[-1].reason for uuid, s in sorted(self.devices.items())}
            if reasons != self.told:
                self.told = reasons
                print(reasons, flush=True)
    def publish_health(self, health):
        if not self.healths:
            print(repr(health.reason), flush=True)
        super().publish_health(health)

source.RETRY_INTERVAL_S = device.PROBE_INTERVAL_S = scanner.INTERVAL_S = 0.2
config = NvmlConfig(interval_s=0.1, stuck_after_s=0.5, mismatch_grace_s=3600)
around = Surroundings(lambda _: None, tuple, lambda: False, lambda _: None)
supervisor, nvml = Supervisor(), source.NvmlSource(config, around, XidLedger())
nvml.start(supervisor, Sink())
sys.stdin.read()
supervisor.stop(1.0)
nvml.close()
print("'closed'", flush=True)
"""


def test_a_late_driver_or_removed_gpu_is_borne(fake_driver: FakeDriver, tmp_path: Path) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    environment = os.environ | fake_driver.environment | {"LD_LIBRARY_PATH": str(folder)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        text=True,
        cwd=Path(__file__).parents[2],
        **pipes,  # type: ignore[call-overload]
    ) as process:
        deadline = threading.Timer(DEADLINE_S, process.kill)
        deadline.start()
        told = (ast.literal_eval(line) for line in process.stdout)
        assert next(told).startswith(f"{LIBRARY} not found: install the NVIDIA driver")
        (folder / LIBRARY).symlink_to(fake_driver.library / LIBRARY)
        all_up = dict.fromkeys(range(8), "")
        assert any(reasons == all_up for reasons in told)
        fake_driver.hang(gpu=5)
        fake_driver.set(3, absent=1)
        assert any(reasons == all_up | {3: "lost", 5: "stuck"} for reasons in told)
        fake_driver.set(3, absent=0)
        assert any(reasons == all_up | {5: "stuck"} for reasons in told)
        # It ends in order while the call is inside.
        process.stdin.close()
        assert any(one == "closed" for one in told)
        assert process.wait(DEADLINE_S) == 0
        deadline.cancel()
