"""Pods that mount only a folder of their own: found, read, kept apart, limited, given up."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.ranks.sources import STATIC, A, B, C, finds_daemon, made_later
from warpwatch import protocol
from warpwatch_daemon.ranks import source
from warpwatch_daemon.ranks.table import LIMITS
from warpwatch_telemetry.records import Step

# The mounts are there before the container's user is: descriptors stand for them.
_AS_USER = """
import os, sys
from warpwatch.rendezvous import find_daemon
folder, inbox = (os.open(path, os.O_RDONLY) for path in sys.argv[1:])
os.setgroups([]), os.setgid(1234), os.setuid(1234)
try:
    os.open("..", os.O_RDONLY, dir_fd=folder)
except PermissionError as error:
    print(type(error).__name__)
mount = f"/proc/self/fd/{folder}"
found = find_daemon({"WARPWATCH_DIR": mount}, os.getuid()) is not None
for name in (f"{mount}/ranks/file", f"/proc/self/fd/{inbox}/file"):
    open(name, "x").close()
print(found)
"""


def with_limits(**changes: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("limits", [LIMITS._replace(**changes)])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(os.getuid() != 0, reason="only root is a kubelet")
def test_what_only_root_may_look_into_serves_a_pod_of_any_user(node):
    node.poll()
    for own in (node.pod(A), node.inbox(A)):
        assert mode(own.parent) == 0o700
        # A kubelet gives a pod's folder the mode of the one above.
        own.mkdir(mode=mode(own.parent))
    node.poll()
    as_user = [sys.executable, "-c", _AS_USER, str(node.pod(A)), str(node.inbox(A))]
    done = subprocess.run(as_user, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("PermissionError\nTrue\n", "")


def test_a_pod_finds_a_rendezvous_of_its_own_and_files_of_no_pod_are_left_alone(node):
    node.mount(A, STATIC)
    (node.folder.path / "pods" / "lost+found").mkdir()
    node.pod(B).write_text("a file")
    node.poll()
    assert node.served() == {A, STATIC}
    assert not node.rejects
    for uid in (A, STATIC):
        pod = node.pod(uid)
        assert [mode(pod / name) for name in ("ranks", "commands")] == [0o1777, 0o755]
        assert mode(node.inbox(uid)) == 0o1777
        # In a process of its own: the lock would be lost with any descriptor of the file.
        said = subprocess.run(["cat", pod / "daemon.lock"], capture_output=True).stdout
        assert json.loads(said)["inbox"] == str(node.inbox(uid))
        assert finds_daemon(pod)
    # A lock that is intact is not renewed.
    locked = (node.pod(A) / "daemon.lock").stat().st_mtime_ns
    node.poll(61)
    assert (node.pod(A) / "daemon.lock").stat().st_mtime_ns == locked
    node.source.close()
    assert not finds_daemon(node.pod(A))


def test_an_inbox_that_the_pod_does_not_mount_is_made_and_it_hears_what_to_mount(node):
    node.poll()
    (node.pod(A) / "commands").mkdir(parents=True)
    (node.pod(A) / "commands" / "left-r0-0123456789abcdef.cmd").touch()
    node.poll()
    assert os.listdir(node.pod(A) / "commands") == []
    assert mode(node.inbox(A)) == 0o1777
    ring = node.met(A)
    (rank,) = node.source.live()
    _, folder = node.source.open_ring(rank)
    assert folder.inbox_remedy == (
        f"mount {node.folder.inbox}/pods with subPathExpr $(POD_UID) at /var/lib/warpwatch/inbox"
    )
    ring.die()
    node.poll()
    assert node.source.open_ring(rank) is None
    assert [len(node.source.take_ended()) for _ in range(2)] == [1, 0]


def test_the_pod_of_a_rank_is_the_one_whose_folder_its_ring_lies_in(node):
    ring = node.ring(A, pod_uid="claimed", device="GPU-1")
    ring.step()
    state = node.newest()
    assert (state.pod_uid, state.device, state.steps_total) == (A, "GPU-1", 1)
    # Later claims do not count more than the first.
    said = {"job": "train", "rank": 0, "world_size": 2, "pod_uid": B, "device": "GPU-2"}
    ring.put(protocol.META_OFFSETS[1], protocol.encode_metadata(2, said))
    state = node.newest()
    assert (state.pod_uid, state.device) == (A, "GPU-2")


def test_ranks_of_one_job_in_several_pods_and_the_shared_folder_are_one_job(node):
    node.mount(A, B)
    for rank, pod in enumerate([None, A, B]):
        node.ring(pod, rank=rank, world_size=3)
    # The same rank of the same job is another run.
    node.met(A, rank=2, world_size=3)
    assert [(s.job.partition("#")[0], s.rank, s.pod_uid) for s in node.states()] == [
        ("train", 0, None),
        ("train", 1, A),
        ("train", 2, B),
        ("train", 2, A),
    ]
    assert len({state.job for state in node.states()}) == 2


def test_what_another_pod_continues_stays_as_long_as_if_it_did_not_with_its_command_file(node):
    node.mount(A, B)
    first, second = node.ring(A), node.file(B)
    command = node.pod(A) / "commands" / f"{first.path.stem}.cmd"
    hidden = second.path.rename(node.pod(B) / "later")
    first.step()
    node.poll()
    assert command.stat().st_size == protocol.COMMAND_SIZE
    assert os.listdir(node.pod(B) / "commands") == os.listdir(node.folder.commands) == []
    first.die()
    node.poll()
    hidden.rename(second.path)
    node.hold(second)
    second.step()
    for poll in (node.poll, node.poll, node.restart, node.poll):
        # Nor is it a rank of its own for the next daemon.
        poll()
        (state,) = node.states()
        assert (state.job, state.pod_uid, state.steps_total) == ("train", B, 2)
        assert first.path.exists() and command.exists()
    node.poll(601)
    assert not (first.path.exists() or command.exists())
    assert second.path.exists()


def test_a_restart_repeats_no_record_of_a_pod_and_mixes_up_no_two(node):
    node.mount(A, B)
    first, second = node.ring(A, job="one"), node.file(B, job="two")
    # A pod that knows the name of another's ring.
    second.path = second.path.rename(node.pod(B) / "ranks" / first.path.name)
    node.hold(second)
    first.steps_of(5)
    second.steps_of(3)
    node.poll()
    node.source.close()
    first.step()
    assert sum(isinstance(record, Step) for record in node.restart()) == 9
    assert [(s.job, s.steps_total, sum(s.durations.counts)) for s in node.states()] == [
        ("one", 6, 6), ("two", 3, 3),
    ]  # fmt: skip
    assert finds_daemon(node.pod(A))


def test_positions_that_were_not_claimed_yet_survive_a_daemon_that_is_killed(node):
    own = node.ring(A, rank=1)
    node.ring(rank=0)
    own.step()
    node.poll()
    node.source.close()
    # This daemon has time for no pod, saves what it has read, and is killed.
    node.limits = LIMITS._replace(scan_s=-1.0)
    node.start().poll(node.clock.wall(), node.clock.monotonic())
    node.limits = LIMITS
    node.source = node.start()
    node.poll()
    assert [(s.rank, sum(s.durations.counts)) for s in node.states()] == [(0, 0), (1, 1)]


def test_a_pod_has_64_rings_whoever_owns_them(node):
    node.mount(A, B)
    for rank in range(67):
        ring = node.file(A, rank=rank, world_size=100)
        if os.getuid() == 0:
            # Root in the container may do that.
            os.chown(ring.path, 1000 + rank, 1000)
    other = node.file(B, rank=99, world_size=100, job="other")
    node.poll()
    assert node.rejects == {"too_many_of_owner": 3}
    assert sum(state.pod_uid == A for state in node.states()) == 64
    assert other.path.stem in {path.stem for path in (node.pod(B) / "commands").iterdir()}


@with_limits(rings=2)
def test_the_limit_of_rings_is_one_for_all_folders_and_who_waits_is_counted_once(node):
    node.mount(A, B)
    rings = [node.ring(pod, rank=rank, world_size=3) for rank, pod in enumerate([None, A, B])]
    node.poll()
    (waiting,) = {0, 1, 2} - {state.rank for state in node.states()}
    node.poll(300)
    assert node.rejects == {"too_many": 1}
    for rank in {0, 1, 2} - {waiting}:
        rings[rank].die()
    # Rings of other folders have gone.
    node.poll(301, 302, 303)
    assert [one.rank for one in node.states() if one.status == "running"] == [waiting]
    assert node.rejects == {"too_many": 1}


@pytest.mark.parametrize("shown", [2, 3])
@with_limits(rings=1)
def test_an_ended_ring_gives_its_place_back_at_once_where_another_waits(node, monkeypatch, shown):
    monkeypatch.setattr(source, "MAX_RINGS_PER_OWNER", shown)
    for rank in range(3):
        node.file(rank=rank, world_size=3).step()
    met: dict[int, None] = {}
    for at_s in range(6):
        node.poll(at_s)
        met |= dict.fromkeys(state.rank for state in node.states())
    newest = sorted([*met][-shown:])
    assert [(state.rank, state.steps_total) for state in node.states()] == [(n, 1) for n in newest]


@with_limits(rings=2)
def test_a_rank_whose_ring_made_room_and_that_goes_on_is_followed(node, monkeypatch):
    monkeypatch.setattr(source, "MAX_RINGS_PER_OWNER", 1)
    about = {"world_size": 3, "run": "r1"}
    for rank in (0, 1):
        node.file(rank=rank, **about).step()
    node.poll(0)
    successor = node.ring(rank=0, **about)
    node.poll(1)
    node.file(rank=2, **about).step()
    node.poll(2)
    successor.step()
    node.poll(3)
    assert [one.rank for one in node.states() if one.status == "running"] == [0]


@with_limits(rings=1)
def test_so_does_one_of_a_run_that_another_has_followed(node):
    for at_s in range(0, 12, 3):
        ring = node.ring()
        ring.step()
        state = node.newest(at_s, at_s + 1)
        assert (state.job, state.status, state.steps_total) == ("train", "running", 1)
        ring.end()
        node.poll(at_s + 2)


def test_what_is_made_within_the_clocks_resolution_of_a_look_is_found_at_the_next(node):
    node.poll()
    folders = (node.folder.path / "pods", node.folder.ranks)
    times = [path.stat().st_mtime_ns for path in folders]
    node.pod(A).mkdir()
    node.ring()
    for path, time_ns in zip(folders, times, strict=True):
        os.utime(path, ns=(time_ns, time_ns))
    node.poll()
    assert (node.served(), len(node.states())) == ({A}, 1)


DAY_S = 24 * 3600.0
one_pod = pytest.mark.parametrize("limits", [LIMITS._replace(pods=1)])


@pytest.fixture
def displaced(node):
    """A pod A whose place pod B takes, where there is room for one."""

    def displace() -> None:
        node.pod(B).mkdir()
        made_later(node.pod(B), than=node.pod(A))
        node.mount(B)
        assert finds_daemon(node.pod(B)) and not finds_daemon(node.pod(A))

    node.mount(A)
    return displace


@pytest.mark.parametrize("limits", [LIMITS._replace(pods=2)])
def test_the_newest_folders_are_served_and_none_with_a_rank_is_given_up(node):
    node.met(A)
    node.mount(B)
    node.pod(C).mkdir()
    made_later(node.pod(C), than=node.pod(B))
    node.mount(C)
    assert [finds_daemon(node.pod(uid)) for uid in (A, B, C)] == [True, False, True]
    node.poll()
    assert node.rejects == {"too_many_pods": 1}
    shutil.rmtree(node.pod(C))
    node.poll(0, 0)
    assert finds_daemon(node.pod(B))


def test_a_pod_that_trains_again_after_days_is_met_again(node):
    ring = node.met(A)
    ring.die()
    node.poll(1, 601, 1.1 * DAY_S, 2 * DAY_S, 3 * DAY_S)
    assert finds_daemon(node.pod(A))
    node.ring(A)
    node.poll(3 * DAY_S + 1)
    assert [state.pod_uid for state in node.states()] == [A]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_cannot_be_served_goes_after_a_day(node):
    node.poll()
    node.pod(A).mkdir()
    os.chown(node.pod(A), 1234, 1234)
    node.poll(DAY_S - 300)
    assert node.pod(A).exists()
    assert node.rejects == {"pod_unusable": 1}
    assert os.listdir(node.pod(A)) == []
    node.poll(DAY_S + 300)
    assert not node.pod(A).exists()


@one_pod
def test_a_folder_that_is_not_served_goes_after_an_hour_with_all_that_is_in_it(node, displaced):
    (node.inbox(A) / "c-1.train.stacks.json").touch()
    (node.pod(A) / "ranks" / "train-r0-0123456789abcdef.ring").write_bytes(b"short")
    (node.pod(A) / "more").mkdir()
    (node.pod(A) / "more" / "notes.txt").touch()
    displaced()
    node.poll(3300)
    assert node.pod(A).exists()
    node.poll(3900)
    assert not node.pod(A).exists()
    assert finds_daemon(node.pod(B))
    # Its inbox is swept, and goes a day after it: only that survives a reboot.
    assert os.listdir(node.inbox(A)) == ["c-1.train.stacks.json"]
    node.inboxes.sweep(3600.0, node.began + DAY_S - 300)
    assert os.listdir(node.inbox(A)) == []
    node.inboxes.sweep(3600.0, node.began + DAY_S + 300)
    assert os.listdir(node.folder.inbox / "pods") == [B]


@one_pod
def test_the_ring_of_a_process_that_lives_is_not_removed_where_no_room_is_left(node, displaced):
    displaced()
    ring = node.ring(A)
    node.poll(3900)
    assert ring.path.exists()
    ring.die()
    node.poll(3901)
    assert not node.pod(A).exists()


def test_a_rank_survives_a_day_without_a_daemon(node):
    node.mount(A)
    node.source.close()
    node.ring(A)
    node.source = node.start()
    node.poll(DAY_S + 60, DAY_S + 180)
    assert [state.pod_uid for state in node.states()] == [A]
    assert finds_daemon(node.pod(A))


def test_the_folder_of_a_rank_is_kept_young(node):
    node.mount(A, B)
    node.met(A)
    before = {uid: node.pod(uid).stat().st_ctime_ns for uid in (A, B)}

    def touched() -> list[bool]:
        return [node.pod(uid).stat().st_ctime_ns > before[uid] for uid in (A, B)]

    node.poll(3300)
    assert touched() == [False, False]
    made_later(node.folder.path, than=node.pod(A))
    node.poll(3900)
    assert touched() == [True, False]


def test_a_folder_that_was_made_again_is_served_again(node):
    ring = node.met(A, steps=1)
    node.pod(A).rename(node.folder.path / "gone")
    ring.path = node.folder.path / "gone" / "ranks" / ring.path.name
    node.mount(A)
    assert finds_daemon(node.pod(A))
    ring.step()
    state = node.newest()
    assert (state.status, state.steps_total) == ("running", 2)
