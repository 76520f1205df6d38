"""Rings in, ranks out: counts that no restart loses or repeats, and the runs that ranks are of."""

import hashlib
import json
import os
import stat
import subprocess
import threading
from datetime import UTC, datetime

import pytest

from tests.cases import cases
from tests.daemon.ranks.sources import RankNode, finds_daemon, ranks_source
from tests.waiting import DEADLINE_S
from warpwatch import protocol
from warpwatch_daemon.config import RendezvousConfig
from warpwatch_daemon.ranks.folder import RendezvousFolder, resolve
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent, RankSeen, Step
from warpwatch_telemetry.state import RankState


def test_a_rank_is_seen_with_its_steps_and_totals(node):
    ring = node.ring(rank=1, device="GPU-1", master="n:1")
    for _ in range(3):
        ring.step(0.2, data_wait_s=0.05, comm_s=0.01)
    seen, *steps = node.poll()
    assert isinstance(seen, RankSeen)
    assert (seen.job, seen.rank, seen.world_size, seen.device) == ("train", 1, 2, "GPU-1")
    assert seen.master == "n:1"
    assert [(step.step, step.duration_s, step.samples) for step in steps] == [
        (0, 0.2, 8), (1, 0.2, 8), (2, 0.2, 8),
    ]  # fmt: skip
    assert steps[0].phases_s == {"data_wait": 0.05, "comm": 0.01}
    (state,) = node.states()
    assert (state.steps_total, state.samples_total, state.status) == (3, 24, "running")
    assert state.phases_s == {"data_wait": pytest.approx(0.15), "comm": pytest.approx(0.03)}
    assert (sum(state.durations.counts), state.durations.sum) == (3, pytest.approx(0.6))
    assert (state.step, state.step_begun, state.serve, state.recent_s) == (2, 3, None, (0.2,) * 3)
    assert state.first_time == state.seen_time == node.clock.wall()


# The second ring has no more room for records that a restarted daemon would only read again.
@pytest.mark.parametrize(("before", "later"), [(5, 4), (300, protocol.RECORD_COUNT - 100)])
def test_a_restarted_daemon_neither_loses_nor_repeats_a_step(node, before, later):
    ring = node.met(steps=before)
    node.source.close()
    ring.steps_of(later)
    total = before + later
    # The detectors see the steps before again, the counts do not.
    again = [one.step for one in node.restart() if isinstance(one, Step)]
    assert again == list(range(max(0, total - protocol.RECORD_COUNT), total))
    (state,) = node.states()
    assert (state.steps_total, sum(state.durations.counts), state.lost_records) == (total, total, 0)
    assert state.durations.sum == pytest.approx(0.1 * total)


def test_a_killed_daemon_reads_again_what_it_had_not_saved(node):
    ring = node.met(steps=1)
    ring.step()
    node.poll(0.1)
    # No position is saved again within a second.
    node.source = node.start()
    state = node.newest(1.0)
    assert (state.steps_total, sum(state.durations.counts)) == (2, 2)


@pytest.mark.parametrize(("most", "steps"), [(20_000, [0, 1, 2]), (1, [1, 2])])
def test_what_a_failed_poll_had_read_comes_with_the_next(node, monkeypatch, most, steps):
    monkeypatch.setattr("warpwatch_daemon.ranks.source.MAX_UNSENT", most)
    ring, ranks = node.ring(), node.folder.ranks
    node.poll()
    ring.steps_of(2)
    away = ranks.rename(node.folder.path / "away")
    with pytest.raises(FileNotFoundError):
        node.poll()
    away.rename(ranks)
    ring.step()
    assert [node.steps(), node.steps()] == [steps, []]


def test_a_reader_that_lags_says_how_many_records_it_lost_and_the_totals(node):
    ring = node.met()
    ring.steps_of(protocol.RECORD_COUNT + 7)
    (event,) = node.events()
    total = protocol.RECORD_COUNT + 7
    assert event.event == "records_lost"
    said = {"records": 7, "steps": total, "samples": 8 * total, "tokens": 3 * total}
    assert event.detail == said
    (state,) = node.states()
    assert (state.lost_records, state.steps_total) == (7, total)
    ring.step()
    assert node.events() == []
    # Nor are those that a restart reads again taken for lost.
    node.restart()
    ring.steps_of(total)
    assert node.newest().lost_records == 14


@pytest.mark.parametrize("while_down", [False, True])
def test_the_successor_of_a_dead_process_continues_its_counters(node, while_down):
    first = node.met(steps=5)
    # However long its run has been there.
    node.clock.advance(650.0)
    if while_down:
        node.source.close()
    first.step()
    if not while_down:
        node.poll()
    first.die()
    node.clock.advance(0.1)
    second = node.ring()
    second.step()
    if while_down:
        node.source = node.start()
    state = node.newest()
    assert (state.job, state.steps_total) == ("train", 7)
    assert (state.samples_total, state.tokens_total) == (8 * 7, 3 * 7)
    node.poll(652.0)
    assert not first.path.exists()


@pytest.mark.parametrize(("steps", "total"), [(9, 9), (4, 6 + 4)])
def test_another_ring_of_a_process_counts_only_what_is_new_unless_it_starts_again(
    node, steps, total
):
    node.met(steps=6, start=7).die()
    node.poll()
    node.ring(start=7).steps_of(steps)
    assert node.newest().steps_total == total


def test_a_killed_process_died_and_one_that_said_so_ended(node):
    killed, ended = node.ring(rank=0), node.ring(rank=1)
    killed.step()
    ended.step()
    node.poll()
    ended.word(protocol.WORD_ENDED, 1)
    assert [[one.event for one in node.events()] for _ in range(2)] == [["finished"], []]
    killed.die()
    ended.end()
    records, now = node.poll(3.0), node.began + 3.0
    died = [(r.rank, r.event, r.time) for r in records if isinstance(r, RankEvent)]
    assert died == [(0, "died", now)]
    assert [(r.rank, r.time) for r in records if isinstance(r, End)] == [(1, now)]
    assert [state.status for state in node.states()] == ["died", "exited"]


def test_a_live_process_without_a_heartbeat_is_stopped_then_resumed(node):
    ring = node.met()
    assert node.poll(9.5) == []
    # A wall clock that is set says nothing about how long the process was silent.
    now, at = node.clock.wall(), node.clock.monotonic()
    assert node.source.poll(now + 9999.0, at) == []
    assert [event.event for event in node.events(10.5)] == ["stopped"]
    ring.heartbeat()
    assert [event.event for event in node.events(12)] == ["resumed"]
    assert [(state.status, state.silent_reason) for state in node.states()] == [("running", None)]
    assert [event.event for event in node.events(21)] == []


def test_a_capturing_process_without_a_heartbeat_is_not_stopped(node):
    ring = node.ring()
    ring.event("capture_started", id="x", step=3)
    assert [type(record) for record in node.poll()] == [RankSeen, RankEvent]
    assert node.poll(119) == []
    assert [event.event for event in node.events(121)] == ["stopped"]
    for end in ("finished", "failed", "disarmed"):
        ring.event("capture_started", id="x", step=3)
        ring.event(f"capture_{end}", id="x")
        told = [event.event for event in node.events()]
        assert told == ["capture_started", f"capture_{end}", "resumed"]
        node.clock.advance(11)
        assert [event.event for event in node.events(200)] == ["stopped"]


@pytest.mark.parametrize("restarts", [False, True])
def test_series_of_an_ended_rank_stay_five_minutes_and_its_ring_ten(node, restarts):
    ring = node.met(device="GPU-1")
    ring.die()
    node.poll()
    assert [*node.source.devices(node.clock.monotonic()).values()] == [None]
    for later_s in (250, 299, 301, 599):
        if restarts:
            node.restart()
        node.poll(later_s)
        assert len(node.states()) == (later_s < 300)
        assert ring.path.exists()
    node.poll(601, 603)
    assert (ring.path.exists(), node.source._positions.load()) == (False, {})


def test_a_poll_that_hangs_leaves_scrapes_the_states_they_saw_last(node):
    hangs, goes_on = threading.Event(), threading.Event()

    def reject(reason: str) -> None:
        hangs.set()
        goes_on.wait(DEADLINE_S)

    node.source = ranks_source(node.folder, reject)
    ring = node.ring()
    ring.step()
    assert node.newest().steps_total == 1
    ring.step()
    ring.event("died")
    polling = threading.Thread(target=node.poll)
    polling.start()
    assert hangs.wait(DEADLINE_S)
    assert [state.steps_total for state in node.states()] == [1]
    goes_on.set()
    polling.join(DEADLINE_S)
    assert [state.steps_total for state in node.states()] == [2]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 1234, 1234)
    with pytest.raises(UsageError, match="belongs to uid 1234"):
        RendezvousFolder(tmp_path / "run", tmp_path / "inbox", "0")


def test_the_folder_of_all_is_open_as_far_as_it_must_be_and_says_who_serves_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("warpwatch.rendezvous.private_dir", lambda uid: str(tmp_path / "own"))
    assert (
        stat.S_IMODE(RendezvousFolder(tmp_path / "own", tmp_path, "0").path.stat().st_mode) == 0o700
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "daemon.lock").write_text("x" * 4096)
    node = RankNode(tmp_path)
    ring, folder = node.file(), node.folder
    command = folder.commands / f"{ring.path.stem}.cmd"
    command.write_bytes(b"x" * 9000)
    (folder.commands / "left-r0-0123456789abcdef.cmd").touch()
    node.hold(ring)
    node.poll()
    modes = [
        stat.S_IMODE(one.stat().st_mode) for one in (folder.path, folder.commands, folder.ranks)
    ]
    assert (modes, command.stat().st_size) == ([0o755, 0o755, 0o1777], protocol.COMMAND_SIZE)
    # The commands of a process stay, and other files are removed.
    node.source._shared.commands.send(ring.path.name, {"op": "x"})
    before = command.stat().st_ino, command.read_bytes()
    node.restart()
    assert (os.listdir(folder.commands), command.read_bytes()) == ([command.name], before[1])
    assert command.stat().st_ino == before[0]
    said = subprocess.run(["cat", folder.path / "daemon.lock"], capture_output=True).stdout
    about = {"version": "0.0.0", "uid": os.getuid(), "pid": os.getpid(), "inbox": str(folder.inbox)}
    assert json.loads(said) == about | {"protocol": protocol.PROTOCOL_VERSION}
    assert finds_daemon(folder.path)
    node.close()
    assert not finds_daemon(folder.path)
    monkeypatch.setattr("warpwatch.rendezvous.SYSTEM_DIR", str(tmp_path / "system"))
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "home")}
    chosen = [resolve(RendezvousConfig(), environ, uid)[0] for uid in (0, 4711)]
    assert chosen == [tmp_path / "system", tmp_path / "home" / "warpwatch"]


def test_a_death_that_no_one_saw_is_dated_before_the_successor_came(node):
    gone = node.file()
    node.clock.advance(0.25)
    gone.step()
    node.clock.advance(0.25)
    node.ring().step()
    node.clock.advance(0.5)
    kinds = [
        record.event if isinstance(record, RankEvent) else type(record).__name__
        for record in node.poll()
    ]
    assert kinds == ["RankSeen", "Step", "died", "RankSeen", "Step"]


def test_a_wrong_clock_dates_no_step_before_its_process_or_after_now(node):
    ring = node.ring()
    for wall_ns in (1 << 62, 0):
        ring._wall_ns = lambda wall_ns=wall_ns: wall_ns
        ring.step()
    steps = [one for one in node.poll(5.0) if isinstance(one, Step)]
    assert [one.time for one in steps] == [node.began, node.began + 5.0]
    assert node.newest().last_step_time == node.began + 5.0


def test_calls_without_steps_are_told_each_two_seconds(node):
    ring, told = node.met(), []
    for at_s, calls in ((1.9, 1), (2.1, 2), (2.2, 3), (4.2, 3), (4.3, 4), (6.0, 4), (6.5, 99)):
        ring.steps_of(at_s == 6.0)
        ring.word(protocol.WORD_CALLS, calls)
        told += [(one.time - node.began, one.event, one.detail) for one in node.events(at_s)]
    assert node.newest().calls_without_step == 0
    assert told == [
        (pytest.approx(at_s), "training", {"calls": n}) for at_s, n in ((2.1, 2), (4.3, 4))
    ]


def test_a_death_that_was_reported_is_not_reported_again_after_a_restart(node):
    ring = node.met(steps=1)
    ring.event("oom")
    ring.record(protocol.RECORD_MEMORY, protocol.MEMORY.pack(*[1] * 6))
    assert [event.event for event in node.events()] == ["oom", "memory"]
    ring.die()
    assert [event.event for event in node.events()] == ["died"]
    assert [type(record) for record in node.restart()] == [RankSeen, Step, End]


def test_a_phase_record_names_a_phase_before_the_metadata_does(node):
    ring = node.ring(phases=[])
    for index, name in enumerate(("data_wait", "comm")):
        ring.record(protocol.RECORD_PHASE, protocol.PHASE.pack(index) + name.encode())
    ring.step(0.2, data_wait_s=0.05, comm_s=0.01)
    (step,) = (record for record in node.poll() if isinstance(record, Step))
    assert step.phases_s == {"data_wait": 0.05, "comm": 0.01}


OWN = f"uid/{os.getuid()}"


def look(node: RankNode) -> dict[JobId, list[RankState]]:
    node.poll()
    jobs: dict[JobId, list[RankState]] = {}
    for rank in node.states():
        jobs.setdefault(rank.job_id, []).append(rank)
    return jobs


def shown(run: str) -> str:
    return f"train#{hashlib.sha256(run.encode()).hexdigest()[:6]}"


def test_a_run_that_is_named_has_that_name_on_every_node_and_in_records(node):
    for rank in (0, 1):
        ring = node.ring(rank=rank, run="slurm-77", master="n:1")
        ring.step()
        ring.event("oom")
    records = node.poll()
    assert {(one.owner, one.job, one.run) for one in records} == {(OWN, "train", "slurm-77")}
    assert {one.master for one in records if isinstance(one, RankSeen)} == {""}
    assert list(look(node)) == [JobId(OWN, "train", "slurm-77")]


@pytest.mark.parametrize(("later_s", "runs"), [(599.0, 1), (601.0, 2)])
def test_ranks_that_name_no_run_are_of_the_one_that_began_up_to_ten_minutes_before(
    node, later_s, runs
):
    first = node.ring(rank=0)
    node.clock.advance(later_s)
    node.ring(rank=1)
    found = look(node)
    assert [len(ranks) for ranks in found.values()] == [2 // runs] * runs
    job, _ = next(iter(found.items()))
    began = datetime.fromtimestamp(node.began, UTC).strftime("%Y%m%dT%H%M%S")
    assert (job.owner, job.name, job.run) == (OWN, "train", f"{began}-{first.path.stem[-6:]}")


@pytest.mark.parametrize("other", cases(__file__)["other_runs"])
def test_what_cannot_be_of_the_same_run_is_another_one_of_its_own_name(node, other):
    node.ring(rank=0, **other.pop("first", {}))
    node.clock.advance(0.1)
    node.ring(**other)
    one, two = look(node)
    assert (one.name, two.name) == ("train", shown(two.run))
    assert one.run != two.run


def test_a_second_process_of_the_same_rank_and_run_is_left_out_and_counted(node):
    for _ in range(2):
        node.ring(run="r1").step()
    ((job, (rank,)),) = look(node).items()
    assert (job.name, rank.steps_total) == ("train", 1)
    assert len(os.listdir(node.folder.commands)) == 1
    assert node.rejects == {"duplicate_rank": 1}


def test_programs_without_peers_under_one_id_are_runs_of_their_own(node):
    """As one Slurm allocation has them."""
    for _ in range(3):
        node.ring(world_size=1, run="77")
    jobs = look(node)
    assert len({job.name for job in jobs}) == len({job.run for job in jobs}) == 3
    assert all(job.run.startswith("77") for job in jobs)
    assert node.rejects == {}


def test_no_two_live_jobs_of_an_owner_are_shown_by_one_name(node):
    node.ring()
    node.ring(run="r2")
    third = node.file(job=shown("r2"), run="r3")
    # A ring's name cannot have this letter, its claims may.
    third.path = third.path.rename(third.path.with_name(third.path.name.replace("#", "-")))
    node.hold(third)
    assert len({job.name for job in look(node)}) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_job_of_another_owner_with_the_same_name_and_run_is_another_job(node):
    first = node.ring(run="r1")
    os.chown(node.ring(rank=1, run="r1").path, 1234, 1234)
    assert sorted(look(node)) == [JobId("uid/0", "train", "r1"), JobId("uid/1234", "train", "r1")]
    # Nor does the next run of one end the series of the other.
    first.end()
    node.poll()
    os.chown(node.ring(rank=1, run="r2").path, 1234, 1234)
    assert JobId("uid/0", "train", "r1") in look(node)


def test_a_run_whose_ranks_ended_in_order_is_over_and_the_next_one_counts_from_0(node):
    first = node.met(steps=1)
    first.end()
    (before,) = look(node)
    node.ring().step()
    ((after, (rank,)),) = look(node).items()
    assert (after.name, rank.steps_total, rank.status) == ("train", 1, "running")
    assert after.run != before.run
    node.poll(601)
    assert not first.path.exists()


def test_a_run_keeps_its_name_over_a_restart_of_the_daemon(node):
    first, _ = node.ring(), node.ring()
    before = look(node)
    assert len({job.name for job in before}) == 2
    first.die()
    node.restart()
    assert sorted(look(node)) == sorted(before)
