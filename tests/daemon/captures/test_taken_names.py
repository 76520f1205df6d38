"""Another user takes every name in the inbox that can be foretold: the capture still comes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.loop.attackers import take_names
from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.programs import STEPPING
from warpwatch import protocol


def commanded(node: LoopNode) -> tuple[str, str] | None:
    """(id, ring) as anyone reads them in the command file."""
    (path,) = (node.run_dir / "commands").glob("*.cmd")
    _, fields = protocol.decode_command(path.read_bytes())
    return (fields["id"], path.stem) if fields else None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_a_hand_over_does_not_fail_by_names_that_another_took(tmp_path: Path) -> None:
    with loop_node(tmp_path) as node:
        node.start_daemon()
        rank = node.start_rank(0, STEPPING, "-1", "0.01", world_size=1)
        poll(lambda: node.get("ranks"), "the rank reports")
        # The attacker is always first.
        rank.send_signal(signal.SIGSTOP)
        answer = node.http.post("/api/v1/captures", json={"job": "stepping", "kind": "stacks"})
        assert answer.status_code == 202
        identifier, ring = poll(lambda: commanded(node), "the rank is asked")
        take_names(tmp_path / "inbox", identifier, ring)
        for path in (tmp_path / "inbox").iterdir():
            os.chown(path, 1234, 1234)
        rank.send_signal(signal.SIGCONT)
        (capture,) = poll(
            lambda: [one for one in node.get("captures") if one["outcome"]], "it ends"
        )
        assert (capture["outcome"], capture["detail"]) == ("complete", "")
        assert [one["state"] for one in capture["ranks"]] == ["written"]
        assert capture["ranks"][0]["detail"] == ""
