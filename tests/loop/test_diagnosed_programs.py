"""Loops that are not one forward and one backward a step get their right verdict by the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.devices.fakenvml.driver import FakeDriver
from tests.loop.devices.node import device_node
from tests.loop.node import ROOT, poll
from tests.loop.trainings import have_trained, start_ranks

pytestmark = [pytest.mark.loops, pytest.mark.torch]

PROGRAMS = ROOT / "tests" / "loop" / "policy_and_adversary.py"


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        # It is the simulation, and not that its actions are read value by value.
        ("ppo", "host_bound"),
        ("gan", "healthy"),
        ("slow_gan", "data_loading"),
    ],
)
def test_a_policy_and_an_adversary(
    tmp_path: Path, fake_nvml: Path, program: str, verdict: str
) -> None:
    driver = FakeDriver(fake_nvml, tmp_path, gpus=1)
    with device_node(tmp_path, driver) as node:
        (tmp_path / program).mkdir()
        start_ranks(node, program, [str(PROGRAMS), program], 1, {"PYTHONPATH": str(ROOT)})
        have_trained(node, program, 1, 30)
        # Stacks make the Python of a loader in the process itself dearer than it is.
        options = ["stacks"] if program == "ppo" else []
        body = {"job": program, "steps": 8, "options": options}
        assert node.http.post("/api/v1/captures", json=body).status_code == 202

        def ended() -> Any:
            return [c for c in node.get("captures") if c["outcome"]]

        (capture,) = poll(ended, "the capture has ended: " + node.log("daemon"))
        assert (capture["outcome"], capture["detail"]) == ("complete", ""), capture
        found = capture["diagnosis"]
        assert found["verdict"] == verdict, found
        if program == "ppo":
            (first, *_) = found["findings"]
            assert any("recorded_faults.py" in said for said in first["evidence"]), first
