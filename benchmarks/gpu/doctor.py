"""What `warpwatch doctor` says of this machine."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.gpu.report import Report
from benchmarks.processes import clean_environment, last_line

COMMAND = (sys.executable, "-m", "warpwatch_daemon", "doctor", "--json")
TIMEOUT_S = 25.0


def check(report: Report) -> None:
    with report.part("doctor") as figures:
        answer = subprocess.run(
            COMMAND, capture_output=True, text=True, timeout=TIMEOUT_S, env=clean_environment()
        )
        # That it finds fault with this machine is no fault of the doctor.
        if answer.returncode not in (0, 1):
            raise RuntimeError(f"exit {answer.returncode}: {last_line(answer.stderr)}")
        figures["checks"] = json.loads(answer.stdout)
        wrong = [one for one in figures["checks"] if one["ok"] is False]
        report.expect(True, f"{len(figures['checks'])} checks, {len(wrong)} find something wrong")
        for one in wrong:
            report.fact(f"{one['name']}: {one['detail']}"[:200])
