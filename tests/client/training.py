"""A training of real torch to capture, and what it answers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.client.daemon_side import Folder, Ring, eventually

# With an optimizer, so that autograd counts. ``inside(step)`` is for a test to define: it runs
# within each step and may be a generator of nothing.
TORCH = """
import sys, time, warnings
import torch
# From here on: without numpy, torch itself warns while it is imported.
warnings.simplefilter("error")
import warpwatch
torch.set_num_threads(1)
monitor = warpwatch.attach(job="demo")
model = torch.nn.Linear(8, 8)
def inside(number): pass
{define}
number = 0
while True:
    with monitor.step():
        inside(number)
        model(torch.ones(4, 8)).sum().backward()
        time.sleep(0.01)
    number += 1
"""


def training(define: str = "") -> str:
    return TORCH.replace("{define}", define)


def running(folder: Folder) -> Ring:
    """The ring of the one process, once it has counted a step."""
    eventually(lambda: [ring for ring in folder.rings() if ring.header.totals.steps])
    return folder.ring()


def begun(folder: Folder) -> int:
    return folder.ring().header.step_begun or 0


def events(folder: Folder, identifier: str) -> list[dict[str, Any]]:
    return [found for found in folder.ring().events if found.get("id") == identifier]


def event(folder: Folder, name: str, identifier: str = "c-1") -> dict[str, Any]:
    """The event ``name`` of the capture, once it was reported."""

    def find() -> dict[str, Any] | None:
        reported = events(folder, identifier)
        return next((found for found in reported if found["event"] == name), None)

    return eventually(find)


def capture(folder: Folder, start: int, steps: int = 2, **more: Any) -> None:
    fields = {"op": "capture", "id": "c-1", "kind": "torch", "arm_timeout_s": 60, **more}
    folder.command(folder.ring().name, start_step=start, steps=steps, **fields)


def captured(folder: Folder, identifier: str = "c-1") -> dict[str, Any]:
    """The trace that the capture brought."""
    path = handed_over(folder, identifier)
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def handed_over(folder: Folder, identifier: str = "c-1") -> Path:
    """The trace's file in the inbox, by the token of the answer."""
    token = event(folder, "capture_finished", identifier)["token"]
    (path,) = (folder.path / "inbox").glob(f"{identifier}.*.{token}.pt.trace.json.gz")
    return path


def files(folder: Folder) -> list[str]:
    """What captures left in the inbox, finished or not."""
    found = (path.name for path in (folder.path / "inbox").iterdir())
    # The file that each rank keeps open there for stacks is no capture's.
    return sorted(name for name in found if not name.startswith("held."))


def names(trace: dict[str, Any]) -> set[str]:
    return {found.get("name", "") for found in trace["traceEvents"]}
