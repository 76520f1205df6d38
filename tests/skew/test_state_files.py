"""State files of version 0.2.0, as its code wrote them, are read by this one."""

import shutil
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from tests.daemon.ranks.sources import RankNode
from tests.manual_clock import ManualClock
from warpwatch_capturing.config import StoreConfig
from warpwatch_capturing.policy import Known
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.store import Store
from warpwatch_daemon.history.archive import FILE, HistoryStore
from warpwatch_daemon.history.runs import RunFiles
from warpwatch_daemon.state.hub import Hub
from warpwatch_fleet.memory import JobStateStore
from warpwatch_telemetry.jobs import JobId

KEPT = Path(__file__).parent


def test_positions_and_counts_of_ranks_continue(tmp_path):
    node = RankNode(tmp_path)
    ring = node.ring(run="r1")
    ring.steps_of(2)
    saved = (KEPT / "positions-0.2.0.json").read_text().replace("RING", ring.path.name)
    node.source.close()
    (tmp_path / "positions.json").write_text(saved)
    node.source = node.start()
    state = node.newest()
    # Three steps were counted of the process before this one.
    assert (state.steps_total, state.samples_total) == (5, 24 + 16)
    assert state.phases_s["data_wait"] >= 0.15
    assert sum(state.durations.counts) == 5
    node.close()


def test_the_history_of_anomalies_is_read(tmp_path):
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        connection.executescript((KEPT / "anomalies-0.2.0.sql").read_text())
    history = HistoryStore(tmp_path, 1e9, pytest.fail)
    assert [(one.id, one.kind, one.rank) for one in history.newest(10)] == [
        ("a1", "hang", 1), ("a2", "hang", 1),
    ]  # fmt: skip
    found, context = history.find("a1") or (None, None)
    assert found is not None and found.end_time == found.time + 60
    assert context is not None and context.series[0].values == {"step_duration_s": (2.0, None)}
    history.close()


def test_the_summary_of_a_run_is_read(tmp_path):
    folder = tmp_path / "runs" / "ns%2Fteam" / "llama%207b"
    folder.mkdir(parents=True)
    shutil.copy(KEPT / "run-0.2.0.json", folder / "r1.json")
    (run,) = RunFiles(tmp_path).load()
    assert (run.job_id, run.judged_steps) == (JobId("ns/team", "llama 7b", "r1"), 162)
    assert run.step_counts == {430: 162}


def test_the_job_of_a_fleet_is_read(tmp_path):
    path = tmp_path / "job.job"
    shutil.copy(KEPT / "fleet-job-0.2.0.job", path)
    clock = ManualClock(wall=path.stat().st_mtime)
    (saved,) = JobStateStore(tmp_path, clock.wall).load().values()
    assert (saved.id.name, saved.history[0].kind) == ("llama", "hang")
    assert "hang" in saved.detectors.parts


def test_captures_are_read_and_one_that_ran_is_interrupted(tmp_path):
    with tarfile.open(KEPT / "captures-0.2.0.tar.gz") as folders:
        folders.extractall(tmp_path, filter="data")
    store = Store(StoreConfig(url=tmp_path.as_uri()))
    register = CaptureRegister(store, Hub(1.0))
    whole, running = register.all()
    assert (whole.outcome, running.outcome) == ("complete", "failed")
    assert running.detail == "interrupted: the daemon ended meanwhile"
    assert [rank.verified for rank in whole.ranks] == [True, True]
    assert (whole.diagnosis or {})["verdict"]
    # It is compared with, bounds the next capture, and its files are still given.
    assert register.known_events(whole.request) == Known(2)
    for name in ("rank0.pt.trace.json.gz", "rank1.reduction.gz"):
        path = register.file(whole.id, name)
        assert path is not None and path.is_file()
    # This version can read the state that it writes over the old one.
    register.update(whole.id, remote="s3://ours/")
    assert store.load(2)[0] == register.get(whole.id)
