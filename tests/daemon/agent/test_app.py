"""The daemon as a whole: its loops, what it asks of other parts, and its end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.daemon.ranks.ring_files import RingFile
from warpwatch import protocol
from warpwatch_daemon.agent.app import Daemon
from warpwatch_daemon.config import Config
from warpwatch_runtime.loading import parse
from warpwatch_telemetry.alerts import NotReadyError
from warpwatch_telemetry.captures import CaptureKind, CaptureRequest

Make = Callable[..., Daemon]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Daemon] = []

    def make(**sections: Any) -> Daemon:
        tree: dict[str, Any] = {
            "http": {"listen": "127.0.0.1:0"},
            "rendezvous": {"dir": str(tmp_path / "run"), "inbox": str(tmp_path / "inbox")},
            "sources": {"nvml": {"enabled": False}, "kernel_log": {"enabled": False}},
            "store": {"url": (tmp_path / "store").as_uri()},
        }
        made.append(Daemon(parse(Config, tree | sections, "test"), None, {}))
        return made[-1]

    yield make
    for daemon in made:
        daemon._close()
        # A stop before the run closes what it listens on.
        daemon.server.stop()
        daemon.server.run()


def test_the_loops_of_a_daemon_with_all_its_parts_are_golden(
    make, tmp_path, golden_case, monkeypatch
):
    url = "http://127.0.0.1:9/"
    daemon = make(
        sources={
            "simulated": {"enabled": True},
            "dcgm": {"enabled": True},
            "dcgm_exporter": {"url": url},
            "host": {"interval_s": 7},
        },
        exporters={
            "jsonl": {"path": str(tmp_path / "log.jsonl")},
            "otlp": {"endpoint": url},
            "webhooks": [{"url": url}],
        },
        attribution={"pod_logs": str(tmp_path), "kubelet_socket": str(tmp_path / "kubelet.sock")},
        remote_store={"url": (tmp_path / "remote").as_uri()},
    )
    steps: dict[str, Callable[[], None]] = {}
    loops: dict[str, Mock] = {}
    lines = [f"trusted for s: {daemon.hub._stale_after_s}\n"]

    def every(name: str, interval_s: float, step: Callable[[], None]) -> Mock:
        steps[name] = step
        lines.append(f"{name} {interval_s:g} {getattr(step, '__qualname__', step)}\n")
        loops[name] = Mock(interval_s=interval_s)
        return loops[name]

    monkeypatch.setattr(daemon.supervisor, "every", every)
    # Before their start, loops are not woken.
    daemon._waking("positions")()
    daemon._hurry(busy=True)
    daemon._start()
    daemon._waking("positions")()
    loops["positions"].wake.assert_called_once()
    for busy, interval_s in ((True, 0.02), (True, 0.02), (False, 0.2)):
        daemon._hurry(busy)
        assert loops["pipeline"].interval_s == interval_s
        loops["pipeline"].wake.assert_called_once()
    golden_case("".join(lines))
    # On an empty node, each of the daemon's own does nothing, and does not fail.
    for name in ("captures", "stacks", "retention", "inboxes", "sweep", "disk", "quotas"):
        steps[name]()
    for name in ("archive", "positions", "telemetry-log", "self", "gone-pods", "runs", "uploads"):
        steps[name]()
    assert (tmp_path / "inbox/pods").is_dir()


def test_a_daemon_wants_the_counters_while_nsys_captures_and_ends_captures_with_itself(make):
    daemon = make()
    ring = RingFile(daemon.folder.ranks, world_size=1)
    with ring.held():
        ring.step()
        with pytest.raises(NotReadyError):
            daemon.receive_alerts([], "")
        daemon.pipeline.step()
        assert [rank.job for rank in daemon.state().ranks] == ["train"]
        kinds: tuple[tuple[CaptureKind, bool], ...] = (("stacks", False), ("nsys", True))
        for kind, wanted in kinds:
            asked = daemon.request_capture(CaptureRequest("train", kind, "manual"))
            assert daemon.captures.counters_wanted() is wanted
            ring.event("capture_failed", id=f"{asked.id}-1", detail="no")
            daemon.pipeline.step()
            daemon.captures.service.finish()
            assert daemon.captures.counters_wanted() is False
        # No one is to record for a daemon that is gone.
        daemon.request_capture(CaptureRequest("train", "torch", "manual"))
        daemon._close()
        command = (daemon.folder.commands / f"{ring.path.stem}.cmd").read_bytes()
        assert protocol.decode_command(command)[1]["op"] == "cancel"
