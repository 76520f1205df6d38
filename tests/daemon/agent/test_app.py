"""The daemon as a whole: its loops, what it asks of other parts, and its end."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.daemon.ranks.ring_files import RingFile
from tests.daemon.state.counted import counted
from warpwatch import protocol
from warpwatch_daemon.agent.app import Daemon
from warpwatch_daemon.config import Config
from warpwatch_daemon.history.runs import RunFiles
from warpwatch_detection.anomalies.register import Change
from warpwatch_exporters.prometheus import Options
from warpwatch_runtime.loading import parse
from warpwatch_telemetry.alerts import NotReadyError
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, CaptureKind, CaptureRequest
from warpwatch_telemetry.errors import Refused, WarpwatchError
from warpwatch_telemetry.jobs import JobId, RunSummary
from warpwatch_telemetry.records import Step
from warpwatch_telemetry.samples import (
    Attribution,
    Device,
    DeviceSample,
    HostSample,
    SourceHealth,
)

Make = Callable[..., Daemon]
REQUEST = CaptureRequest("train", "nsys", "manual")
# The sources of answers over HTTP.
ASKED = (
    "state", "overview", "exported", "lease", "request_capture", "prepare_capture",
    "receive_alerts", "capture_file", "anomaly", "resolve_anomaly", "detector_statuses",
    "run_summaries",
)  # fmt: skip


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Daemon] = []
    handlers = {
        one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }

    def make(**sections: Any) -> Daemon:
        tree: dict[str, Any] = {
            "http": {"listen": "127.0.0.1:0"},
            "rendezvous": {"dir": str(tmp_path / "run"), "inbox": str(tmp_path / "inbox")},
            "sources": {"nvml": {"enabled": False}, "kernel_log": {"enabled": False}},
            "store": {"url": (tmp_path / "store").as_uri()},
        }
        named = {"NODE_NAME": "gpu-7"}
        made.append(Daemon(parse(Config, tree | sections, "test"), None, named))
        return made[-1]

    yield make
    for daemon in made:
        daemon._close()
        # A stop before the run closes what it listens on.
        daemon.server.stop()
        daemon.server.run()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_loops_of_a_daemon_with_all_its_parts_are_golden(
    make, tmp_path, golden_case, monkeypatch
):
    url = "http://127.0.0.1:9/"
    run = RunSummary("ns/team", "llama", "r1", 2.0, 1.0, end_time=2.0, ranks=(0,))
    (tmp_path / "store").mkdir()
    RunFiles(tmp_path / "store").save(run)
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
    lines += [f"{name}: {getattr(daemon, name).__qualname__}\n" for name in ASKED]
    assert daemon._known_pods == daemon.ranks._known_pods == daemon.hub.pods

    def every(name: str, interval_s: float, step: Callable[[], None]) -> Mock:
        steps[name] = step
        lines.append(f"{name} {interval_s:g} {getattr(step, '__qualname__', step)}\n")
        loops[name] = Mock(interval_s=interval_s)
        return loops[name]

    monkeypatch.setattr(daemon.supervisor, "every", every)
    monkeypatch.setattr(daemon.supervisor, "failures", lambda: {"pipeline": 3})
    vars(daemon)["_bus"] = SimpleNamespace(run=print, close=lambda: None)
    # Before their start, loops are not woken.
    daemon._waking("positions")()
    daemon._hurry(busy=True)
    daemon._start()
    daemon._positions._wake()
    daemon.archive._wake()
    assert [loops[name].wake.call_count for name in ("positions", "archive")] == [1, 1]
    for busy, interval_s in ((True, 0.02), (True, 0.02), (False, 0.2)):
        daemon._hurry(busy)
        assert loops["pipeline"].interval_s == interval_s
        loops["pipeline"].wake.assert_called_once()
    golden_case("".join(lines))
    daemon._positions._fail()
    daemon.archive._fail("queue")
    assert counted(daemon.hub, "rendezvous_rejected_total", "not_saved") == 1
    assert counted(daemon.hub, "anomaly_store_errors_total", "queue") == 1
    # On an empty node, each of the daemon's own does nothing, and does not fail.
    (tmp_path / "inbox/new").touch()
    for name in ("captures", "stacks", "retention", "inboxes", "sweep", "disk", "quotas"):
        steps[name]()
    for name in ("archive", "positions", "telemetry-log", "self", "gone-pods", "runs", "uploads"):
        steps[name]()
    assert sorted(path.name for path in (tmp_path / "inbox").iterdir()) == ["new", "pods"]
    assert list(tmp_path.glob("remote/runs/*/llama/r1.json"))
    assert counted(daemon.hub, "loop_failures_total", "pipeline") == 3
    # The processes of an owner over quota are not captured.
    daemon.captures._quotas._excess = {7: "much"}
    with pytest.raises(Refused, match="much"):
        daemon.captures.policy.check_owners([7])


def test_a_daemon_wants_the_counters_while_nsys_captures_and_ends_captures_with_itself(
    make, tmp_path, monkeypatch
):
    daemon: Any = make()
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
        # The pipe of a process that has ended is removed.
        os.mkfifo(pipe := tmp_path / "inbox" / f"held.{ring.path.stem}.stacks.fifo")
        asked = daemon.request_capture(CaptureRequest("train", "torch", "manual"))
        cancelled = daemon.cancel_capture(asked.id)
        assert cancelled is not None and cancelled.ranks[0].detail == "cancelled by the fleet"
        daemon.pipeline.step()
        daemon.captures.service.finish()
        # No one is to record for a daemon that is gone, and each part ends.
        daemon.request_capture(CaptureRequest("train", "torch", "manual"))
        daemon._log = daemon._bus = end = Mock()
        daemon.sources.append(end)
        daemon._push_exporters = Mock(last_words={"otlp": end.last_words})
        for part in (daemon.pipeline, daemon.ranks, daemon.runs):
            monkeypatch.setattr(part, "close", Mock(side_effect=part.close))
        daemon._close()
        assert {name for name, *_ in end.mock_calls} == {"close", "write", "last_words"}
        assert end.close.call_count == 2
        for part in (daemon.pipeline, daemon.ranks, daemon.runs):
            part.close.assert_called_once()
        command = (daemon.folder.commands / f"{ring.path.stem}.cmd").read_bytes()
        assert protocol.decode_command(command)[1]["op"] == "cancel"
    daemon.ranks.poll(2e9, 1e9)
    daemon.captures._tend_inboxes()
    assert not pipe.exists()


def test_a_daemon_passes_what_is_configured_and_pushes_what_is_its_own(make):
    prometheus = {"workload_labels": "inline", "dcgm_names": True, "profile": "minimal"}
    hang = {"stopped_after_s": 7, "timeout_s": 99}
    daemon = make(exporters={"prometheus": prometheus}, detection={"hang": hang})
    assert (daemon.state().hostname, daemon.ranks._stopped_after_s) == ("gpu-7", 7)
    assert daemon.exposition() == Options(inline_workloads=True, dcgm_names=True, profile="minimal")
    # The fleet pushes what continues its anomaly or is a part of its capture.
    daemon.pipeline.leases._names["own"] = "1-f"
    found = [Anomaly(1.0, "warning", "slow", id=name, kind="hang") for name in ("1-f", "2")]
    captures = [Capture("c", REQUEST, 1.0, of_fleet=of_fleet) for of_fleet in (True, False)]
    daemon.hub.publish(anomalies=tuple(found), captures=tuple(captures))
    own = daemon._own_state()
    assert (own.anomalies, own.captures) == ((found[1],), (captures[1],))
    # The kubelet may be away, other sources not.
    for name in ("attribution", "nvml"):
        daemon.hub.publish_health(SourceHealth(name, up=False, reason="gone"))
    daemon.archive._complaint.make("no disk")
    assert daemon.missing() == ("nvml: gone", "no disk")
    daemon._fail("only a restart helps")
    assert daemon.records().closed
    with pytest.raises(WarpwatchError, match="only a restart helps"):
        daemon.run()
    assert "Daemon.run" in str(signal.getsignal(signal.SIGINT))


class Counted:
    """A lock that counts how often it was acquired."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.times = lock, 0
        self.release = lock.release

    def acquire(self, **wait: float) -> bool:
        self.times += 1
        return bool(self._lock.acquire(**wait))

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_the_locks_of_what_threads_share_are_golden(make, golden_case):
    daemon, job, text = make(), JobId("ns/team", "llama", "r1"), ""
    hub, archive, rank = daemon.hub, daemon.archive, SimpleNamespace(live=False)
    anomaly = Anomaly(1.0, "warning", "slow", **job.fields(), id="a", kind="straggler")
    run, sample = RunSummary(*job, 2.0, 1.0), DeviceSample(Device("GPU-1", 0, "H100"), 1.0)
    calls: dict[Any, dict[str, tuple[Any, ...]]] = {
        hub: {
            "publish_device": (sample,),
            "publish_host": (HostSample(1.0, {}),),
            "publish_processes": (HostSample(1.0, {}),),
            "follow_ranks": ({},),
            "publish_attribution": (Attribution("slurm", 1.0),),
            "publish": (),
            "publish_health": (SourceHealth("nvml", up=True),),
            "job_energy": (job,),
            "health": (),
            "ranks_known": (),
            "devices": (),
            "pods": (),
            "captures": (),
            "state": (),
            "forget_device": ("GPU-1",),
        },
        daemon.ranks: {
            "poll": (1.0, 1.0),
            "states": (1.0,),
            "devices": (1.0,),
            "targets": (job,),
            "open_ring": (rank,),
            "step_begun": (rank,),
            "served_pods": (),
            "idle_pods": (),
            "take_ended": (),
            "live": (),
            "close": (),
        },
        daemon.runs: {
            "observe": (Step(1.0, "llama", 0, 1, 1.0),),
            "advance": (1.0,),
            "copied": (run, "s3://a"),
            "all": (),
            "take_changed": (),
            "write": (),
        },
        daemon._stream: {
            "put": ([],),
            "put_anomaly": (anomaly,),
            "put_captures": ((),),
            "put_runs": ([],),
            "portion": (None,),
            "live": (),
            "live_keys": (),
        },
        daemon._positions: {"put": ((),), "write": ()},
        daemon.pipeline.leases: {"acquire": (job, "fleet", 1.0), "expire": ((),), "state": ()},
        archive: {
            "note_change": (Change("opened", replace(anomaly)),),
            "advance": (1e9,),
            "_put_back": ({},),
            "write": (),
        },
        archive._store: {"write": ((), 1.0), "newest": (1,), "find": ("a",), "close": ()},
        daemon.pipeline: {"step": (), "detector_statuses": (), "resolve": ("a", "b"), "close": ()},
    }
    for part, operations in calls.items():
        for name, given in operations.items():
            locks = {n: one for n, one in vars(part).items() if isinstance(one, LOCK)}
            counters = {n: Counted(lock) for n, lock in locks.items()}
            vars(part).update(counters)
            with suppress(Refused):
                found = getattr(part, name)
                found = found(*given) if callable(found) else found
            vars(part).update(locks)
            times = ", ".join(f"{n} {one.times}" for n, one in counters.items())
            text += f"{type(part).__name__}.{name}: {times}\n"
    golden_case(text)


LOCK = type(threading.Lock())
