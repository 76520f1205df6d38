"""One script that knows nothing of Warpwatch, plain and under ``run`` beside a daemon."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.client.daemon_side import Ring
from tests.loop.node import ROOT, loop_node, poll

pytestmark = [pytest.mark.loops, pytest.mark.torch]

SCRIPT = ROOT / "tests" / "loop" / "unmodified.py"
# As in unmodified.py, which imports torch.
STEPS, ACCUMULATED, EVERY, BATCH = 120, 4, 50, 32
NAMED = {"data_wait", "forward", "backward", "optimizer", "eval", "checkpoint"}


def run(command: list[str], folder: Path, **environ: str) -> tuple[int, str, str]:
    folder.mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WARPWATCH")}
    done = subprocess.run(
        [*command, sys.executable, str(SCRIPT), str(folder)],
        env=kept | environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_an_unmodified_script_is_the_same_and_its_steps_and_phases_are_seen(tmp_path):
    plain = run([], tmp_path / "plain")
    assert plain[0] == 3
    assert plain[1].startswith("step 50: 0.")
    assert "losses" in plain[2]
    with loop_node(tmp_path) as node:
        node.start_daemon()
        environ = {
            "WARPWATCH_DIR": str(node.run_dir),
            "WARPWATCH_INBOX": str(tmp_path / "inbox"),
            "WARPWATCH_ATTACH_INTERVAL_S": "0.05",
        }
        command = [sys.executable, "-m", "warpwatch", "run", "--job", "plain", "--"]
        assert run(command, tmp_path / "observed", **environ) == plain
        # The workers are no ranks.
        (path,) = (node.run_dir / "ranks").glob("*.ring")
        ring = Ring(path)
        ranks = poll(lambda: node.get("ranks"), "the daemon sees the rank")
        assert [(rank["job"], rank["rank"]) for rank in ranks] == [("plain", 0)]
    assert (tmp_path / "observed" / "model.pt").exists()
    check_totals(ring)
    check_steps(ring)


def check_totals(ring: Ring) -> None:
    totals = ring.header.totals
    assert ring.header.ended
    assert ring.metadata["step_clock"] == "optimizer"
    assert ring.metadata["faults"] == 0
    assert totals.steps == STEPS
    assert totals.samples == STEPS * ACCUMULATED * BATCH
    assert set(ring.metadata["phases"]) >= NAMED
    named = named_ns(ring.metadata["phases"], totals.phases_ns)
    assert all(named.values()), named
    # All phases of a step are disjoint: what is in none is the rest. The script does little else.
    assert 0.95 * totals.duration_ns <= sum(named.values()) <= totals.duration_ns


def check_steps(ring: Ring) -> None:
    names = ring.metadata["phases"]
    assert len(ring.steps) >= STEPS - 20
    for number, duration_ns, _, _, samples, _, *rest in ring.steps:
        phases = named_ns(names, rest[:-1])
        assert sum(phases.values()) <= duration_ns
        assert samples == ACCUMULATED * BATCH
        # Every 50th step evaluates and saves after it has ended: the next one pays.
        paid = number in (EVERY, 2 * EVERY)
        assert (phases.get("eval", 0) > 0, phases.get("checkpoint", 0) > 0) == (paid, paid)


def named_ns(names: list[str], phases_ns: Any) -> dict[str, int]:
    return {name: ns for name, ns in zip(names, phases_ns, strict=False) if name in NAMED}
