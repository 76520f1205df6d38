"""Rings in, ranks out: counts that no restart loses or repeats."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.daemon.ranks.ring_files import RingFile
from tests.daemon.ranks.sources import ranks_source
from warpwatch import protocol
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.rank import Rank
from warpwatch_daemon.ranks.saved import Positions
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.records import End, RankEvent, RankSeen, Step


def test_a_rank_is_seen_with_its_steps_and_totals(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks, rank=1, device="GPU-1")
    with ring.held():
        for _ in range(3):
            ring.step(0.2, data_wait_s=0.05, comm_s=0.01)
        seen, *steps = source.poll(time.time(), time.monotonic())
        assert isinstance(seen, RankSeen)
        assert (seen.job, seen.rank, seen.world_size, seen.device) == ("train", 1, 2, "GPU-1")
        assert [step.step for step in steps if isinstance(step, Step)] == [0, 1, 2]
        first = steps[0]
        assert isinstance(first, Step)
        assert first.phases_s == {"data_wait": 0.05, "comm": 0.01}
        (state,) = source.states(time.monotonic())
        assert (state.steps_total, state.samples_total, state.status) == (3, 24, "running")
        assert state.phases_s["data_wait"] == pytest.approx(0.15)
        assert sum(state.durations.counts) == 3


def test_a_restarted_daemon_neither_loses_nor_repeats_a_step(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        for _ in range(5):
            ring.step()
        source.poll(time.time(), time.monotonic())
        source.close()
        for _ in range(4):
            ring.step()
        successor = ranks_source(folder)
        records = successor.poll(time.time(), time.monotonic())
        # The detectors see the steps before again, the counts do not.
        assert [record.step for record in records if isinstance(record, Step)] == list(range(9))
        (state,) = successor.states(time.monotonic())
        assert state.steps_total == 9
        assert sum(state.durations.counts) == 9


def test_a_killed_daemon_reads_again_what_it_had_not_saved(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        ring.step()
        now, at = time.time(), time.monotonic()
        source.poll(now, at)
        ring.step()
        source.poll(now + 0.1, at + 0.1)
        successor = ranks_source(folder)
        successor.poll(now + 1, at + 1)
        (state,) = successor.states(at + 1)
        assert sum(state.durations.counts) == 2
        assert state.steps_total == 2


def test_what_a_failed_poll_had_read_comes_with_the_next(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        source.poll(time.time(), time.monotonic())
        ring.step()
        folder.ranks.rename(folder.path / "away")
        with pytest.raises(FileNotFoundError):
            source.poll(time.time(), time.monotonic())
        (folder.path / "away").rename(folder.ranks)
        ring.step()
        for steps in ([0, 1], []):
            records = source.poll(time.time(), time.monotonic())
            assert [record.step for record in records if isinstance(record, Step)] == steps


def test_no_position_is_dropped_before_its_ring_is_read(
    folder: RendezvousFolder, source: RanksSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = RingFile(folder.ranks, rank=0)
    with dead.held():
        source.poll(time.time(), time.monotonic())
    successor, other = RingFile(folder.ranks, rank=0), RingFile(folder.ranks, rank=1)
    with successor.held(), other.held():
        hidden = successor.path.rename(folder.path / "hidden")
        source.poll(time.time(), time.monotonic())
        source.close()
        hidden.rename(successor.path)
        saved_rings: list[set[str]] = []
        write = Positions.write

        def seen(positions: Positions) -> None:
            write(positions)
            saved_rings.append({ring for _, ring in positions.load()})

        monkeypatch.setattr(Positions, "write", seen)
        later = ranks_source(folder)
        later.poll(time.time(), time.monotonic())
        assert all(other.path.name in rings for rings in saved_rings)
        assert len(saved_rings) == 2
        later.close()


def test_a_reader_that_lags_says_how_many_records_it_lost(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        source.poll(time.time(), time.monotonic())
        for _ in range(protocol.RECORD_COUNT + 7):
            ring.step()
        source.poll(time.time(), time.monotonic())
        (state,) = source.states(time.monotonic())
        assert state.lost_records == 7
        assert state.steps_total == protocol.RECORD_COUNT + 7


def test_the_successor_of_a_dead_process_continues_its_counters(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    first = RingFile(folder.ranks)
    with first.held():
        for _ in range(6):
            first.step()
        source.poll(time.time(), time.monotonic())
    second = RingFile(folder.ranks)
    with second.held():
        second.step()
        source.poll(time.time(), time.monotonic())
        (state,) = source.states(time.monotonic())
        assert (state.job, state.steps_total) == ("train", 7)
        assert not first.path.exists()


def test_a_successor_that_came_while_the_daemon_was_down_continues_too(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    first = RingFile(folder.ranks)
    with first.held():
        first.step()
        source.poll(time.time(), time.monotonic())
        source.close()
        first.step()
    second = RingFile(folder.ranks)
    with second.held():
        second.step()
        later = ranks_source(folder)
        later.poll(time.time(), time.monotonic())
        (state,) = later.states(time.monotonic())
        assert state.steps_total == 3


def test_a_killed_process_died_and_one_that_said_so_ended(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    killed, ended = RingFile(folder.ranks, rank=0), RingFile(folder.ranks, rank=1)
    with killed.held(), ended.held():
        killed.step()
        ended.step()
        source.poll(time.time(), time.monotonic())
    ended.word(protocol.WORD_ENDED, 1)
    records = source.poll(time.time(), time.monotonic())
    assert [(r.rank, r.event) for r in records if isinstance(r, RankEvent)] == [(0, "died")]
    assert [r.rank for r in records if isinstance(r, End)] == [1]


def test_a_live_process_without_a_heartbeat_is_stopped_then_resumed(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        now, at = time.time(), time.monotonic()
        source.poll(now, at)
        assert source.poll(now + 9, at + 9) == []
        # A wall clock that is set says nothing about how long the process was silent.
        assert source.poll(now + 9999, at + 9) == []
        (stopped,) = source.poll(now + 11, at + 11)
        assert isinstance(stopped, RankEvent)
        assert stopped.event == "stopped"
        ring.heartbeat()
        (resumed,) = source.poll(now + 12, at + 12)
        assert isinstance(resumed, RankEvent)
        assert resumed.event == "resumed"


def test_a_capturing_process_without_a_heartbeat_is_not_stopped(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        ring.event("capture_started", id="x", step=3)
        now, at = time.time(), time.monotonic()
        assert [type(record) for record in source.poll(now, at)] == [RankSeen, RankEvent]
        assert source.poll(now + 60, at + 60) == []


def test_series_of_an_ended_rank_stay_five_minutes_and_its_ring_ten(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        source.poll(time.time(), time.monotonic())
    now, at = time.time(), time.monotonic()
    source.poll(now, at)
    assert len(source.states(at + 299)) == 1
    assert source.states(at + 301) == ()
    source.poll(now, at + 599)
    assert ring.path.exists()
    source.poll(now, at + 601)
    assert not ring.path.exists()


def test_restarts_do_not_keep_the_ring_of_an_ended_rank_longer(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        source.poll(time.time(), time.monotonic())
    now, at = time.time(), time.monotonic()
    source.poll(now, at)
    for later_s in (250, 500, 599):
        source.close()
        source = ranks_source(folder)
        source.poll(now, at + later_s)
        assert ring.path.exists()
        assert len(source.states(at + later_s)) == (later_s < 300)
    source.poll(now, at + 601)
    assert not ring.path.exists()


def test_a_poll_that_hangs_leaves_scrapes_the_states_they_saw_last(
    folder: RendezvousFolder,
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def reject(reason: str) -> None:
        hangs.set()
        goes_on.wait(30)

    source = ranks_source(folder, reject)
    ring = RingFile(folder.ranks)
    with ring.held():
        ring.step()
        source.poll(time.time(), time.monotonic())
        assert [state.steps_total for state in source.states(time.monotonic())] == [1]
        ring.step()
        ring.event("died")
        polling = threading.Thread(target=source.poll, args=(time.time(), time.monotonic()))
        polling.start()
        assert hangs.wait(30)
        assert [state.steps_total for state in source.states(time.monotonic())] == [1]
        goes_on.set()
        polling.join(30)
        assert [state.steps_total for state in source.states(time.monotonic())] == [2]


def test_a_second_daemon_on_the_folder_is_refused(folder: RendezvousFolder) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from warpwatch_daemon.ranks.folder import RendezvousFolder\n"
        "RendezvousFolder(Path(sys.argv[1]), Path(sys.argv[2]), '9')"
    )
    arguments = [sys.executable, "-c", code, str(folder.path), str(folder.inbox)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert "already served by warpwatch 0.0.0" in done.stderr


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 1234, 1234)
    with pytest.raises(UsageError, match="belongs to uid 1234"):
        RendezvousFolder(tmp_path / "run", tmp_path / "inbox", "0")


def test_two_jobs_of_one_name_keep_their_labels_over_a_restart(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    first, second = RingFile(folder.ranks), RingFile(folder.ranks)
    with second.held():
        with first.held():
            first.step()
            second.step()
            source.poll(time.time(), time.monotonic())
            labels = {rank.job: rank.ring.name for rank in ranks_of(source) if rank.ring}
        source.poll(time.time(), time.monotonic())
        source.close()
        successor = ranks_source(folder)
        successor.poll(time.time(), time.monotonic())
        assert {rank.job: rank.ring.name for rank in ranks_of(successor) if rank.ring} == labels


def ranks_of(source: RanksSource) -> list[Rank]:
    return source._ranks


def test_a_death_that_no_one_saw_is_dated_before_the_successor_came(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    first = RingFile(folder.ranks)
    first.step()
    time.sleep(0.05)
    second = RingFile(folder.ranks)
    with second.held():
        second.step()
        records = source.poll(time.time(), time.monotonic())
    kinds = [
        record.event if isinstance(record, RankEvent) else type(record).__name__
        for record in records
    ]
    assert kinds == ["RankSeen", "Step", "died", "RankSeen", "Step"]


def test_a_death_that_was_reported_is_not_reported_again_after_a_restart(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        ring.step()
        source.poll(time.time(), time.monotonic())
    reported = source.poll(time.time(), time.monotonic())
    assert [r.event for r in reported if isinstance(r, RankEvent)] == ["died"]
    source.close()
    successor = ranks_source(folder)
    again = successor.poll(time.time(), time.monotonic())
    assert [type(record) for record in again] == [RankSeen, Step, End]


def test_a_phase_record_names_a_phase_before_the_metadata_does(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks, phases=[])
    with ring.held():
        for index, name in enumerate(("data_wait", "comm")):
            ring.record(protocol.RECORD_PHASE, protocol.PHASE.pack(index) + name.encode())
        ring.step(0.2, data_wait_s=0.05, comm_s=0.01)
        records = source.poll(time.time(), time.monotonic())
        (step,) = [record for record in records if isinstance(record, Step)]
        assert step.phases_s == {"data_wait": 0.05, "comm": 0.01}
