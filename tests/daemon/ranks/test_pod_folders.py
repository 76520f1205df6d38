"""Pods that mount only a folder of their own: found, read, kept apart, limited."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.daemon.ranks.pod_node import STATIC, A, B, PodNode, finds_daemon
from tests.daemon.ranks.ring_files import RingFile
from warpwatch import protocol
from warpwatch_daemon.ranks import ended
from warpwatch_daemon.ranks.table import LIMITS, Limits
from warpwatch_telemetry.records import Step

# The mounts are there before the container's user is: descriptors stand for them.
_AS_USER = """
import os, sys
from warpwatch.daemon_folder import find_daemon
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


@pytest.fixture
def limits() -> Limits:
    return LIMITS


@pytest.fixture
def node(tmp_path: Path, limits: Limits) -> Iterator[PodNode]:
    node = PodNode(tmp_path, limits)
    yield node
    node.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_daemon_makes_the_folders_above_those_of_pods_at_its_start(node: PodNode) -> None:
    node.poll()
    assert mode(node.folder.path / "pods") == 0o700
    assert mode(node.folder.inbox / "pods") == 0o700


def test_what_only_root_may_look_into_serves_a_pod_of_any_user(node: PodNode) -> None:
    if os.getuid() != 0:
        pytest.skip("only root is a kubelet")
    node.poll()
    for own in (node.pod(A), node.inbox(A)):
        # A kubelet gives a pod's folder the mode of the one above.
        own.mkdir(mode=mode(own.parent))
    node.poll()
    as_user = [sys.executable, "-c", _AS_USER, str(node.pod(A)), str(node.inbox(A))]
    done = subprocess.run(as_user, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("PermissionError\nTrue\n", "")


def test_a_pod_finds_a_rendezvous_of_its_own(node: PodNode) -> None:
    node.mount(A, STATIC)
    for uid in (A, STATIC):
        pod = node.pod(uid)
        assert [mode(pod / name) for name in ("ranks", "commands")] == [0o1777, 0o755]
        assert mode(node.inbox(uid)) == 0o1777
        # In a process of its own: the lock would be lost with any descriptor of the file.
        said = subprocess.run(["cat", pod / "daemon.lock"], capture_output=True).stdout
        assert json.loads(said)["inbox"] == str(node.inbox(uid))
        assert finds_daemon(pod)
    node.source.close()
    assert not finds_daemon(node.pod(A))


def test_an_inbox_that_the_pod_does_not_mount_is_made_all_the_same(node: PodNode) -> None:
    node.poll()
    node.pod(A).mkdir()
    node.poll()
    assert mode(node.inbox(A)) == 0o1777


def test_only_folders_with_the_uid_of_a_pod_are_served(node: PodNode) -> None:
    node.mount(A)
    (node.folder.path / "pods" / "lost+found").mkdir()
    node.pod(B).write_text("a file")
    node.poll()
    assert node.served() == {A}
    assert not node.rejects


def test_the_pod_of_a_rank_is_the_one_whose_folder_its_ring_lies_in(node: PodNode) -> None:
    node.mount(A)
    ring = RingFile(node.pod(A) / "ranks", pod_uid="claimed", device="GPU-1")
    with ring.held():
        ring.step()
        node.poll()
        (state,) = node.states()
        assert (state.pod_uid, state.device, state.steps_total) == (A, "GPU-1", 1)
        # What it says later does not count more than what it said first.
        said = {"job": "train", "rank": 0, "world_size": 2, "pod_uid": B, "device": "GPU-2"}
        ring.put(protocol.META_OFFSETS[1], protocol.encode_metadata(2, said))
        node.poll()
        (state,) = node.states()
        assert (state.pod_uid, state.device) == (A, "GPU-2")


def test_ranks_of_one_job_in_several_pods_and_the_shared_folder_are_one_job(node: PodNode) -> None:
    node.mount(A, B)
    with ExitStack() as stack:
        for rank, ranks in enumerate(
            [node.folder.ranks, node.pod(A) / "ranks", node.pod(B) / "ranks"]
        ):
            stack.enter_context(RingFile(ranks, rank=rank, world_size=3).held())
        node.poll()
        assert [(s.job, s.rank, s.pod_uid) for s in node.states()] == [
            ("train", 0, None),
            ("train", 1, A),
            ("train", 2, B),
        ]


def test_the_same_rank_of_the_same_job_in_another_pod_is_another_run(node: PodNode) -> None:
    node.mount(A, B)
    first, second = RingFile(node.pod(A) / "ranks"), RingFile(node.pod(B) / "ranks")
    with first.held(), second.held():
        node.poll()
        found = [(state.job.partition("#")[0], state.pod_uid) for state in node.states()]
        assert found == [("train", A), ("train", B)]
        assert len({state.job for state in node.states()}) == 2


def test_what_another_pod_continues_stays_as_long_as_if_it_did_not(node: PodNode) -> None:
    node.mount(A, B)
    first, second = RingFile(node.pod(A) / "ranks"), RingFile(node.pod(B) / "ranks")
    command = node.pod(A) / "commands" / f"{first.path.stem}.cmd"
    second.path.rename(node.pod(B) / "later")
    with first.held():
        first.step()
        node.poll()
    node.poll()
    (node.pod(B) / "later").rename(second.path)
    with second.held():
        second.step()
        for _ in range(2):
            node.poll()
            (state,) = node.states()
            assert (state.job, state.pod_uid, state.steps_total) == ("train", B, 2)
            assert first.path.exists()
            assert command.exists()
            node.source.close()
            # Nor is it a rank of its own for the next daemon.
            node.source = node.start()
        node.poll()
        node.poll(601)
        assert not first.path.exists()
        assert not command.exists()
        assert second.path.exists()


def test_a_command_file_lies_in_the_folder_of_the_ring_and_goes_with_it(node: PodNode) -> None:
    node.mount(A, B)
    ring = RingFile(node.pod(A) / "ranks")
    command = node.pod(A) / "commands" / (ring.path.stem + ".cmd")
    with ring.held():
        node.poll()
        assert command.stat().st_size == protocol.COMMAND_SIZE
        assert os.listdir(node.pod(B) / "commands") == []
        assert os.listdir(node.folder.commands) == []
    node.poll()
    node.poll(601)
    assert not ring.path.exists()
    assert not command.exists()


def test_a_restart_repeats_no_record_of_a_pod_and_mixes_up_no_two(node: PodNode) -> None:
    node.mount(A, B)
    first = RingFile(node.pod(A) / "ranks", job="one")
    second = RingFile(node.pod(B) / "ranks", job="two")
    # A pod that knows the name of another's ring.
    second.path = second.path.rename(node.pod(B) / "ranks" / first.path.name)
    with first.held(), second.held():
        for ring, count in ((first, 5), (second, 3)):
            for _ in range(count):
                ring.step()
        node.poll()
        node.source.close()
        first.step()
        node.source = node.start()
        steps = [record for record in node.poll() if isinstance(record, Step)]
        assert len(steps) == 9
        assert [(s.job, s.steps_total, sum(s.durations.counts)) for s in node.states()] == [
            ("one", 6, 6),
            ("two", 3, 3),
        ]
        assert finds_daemon(node.pod(A))


def test_positions_that_were_not_claimed_yet_survive_a_daemon_that_is_killed(
    node: PodNode,
) -> None:
    node.mount(A)
    shared, own = RingFile(node.folder.ranks, rank=0), RingFile(node.pod(A) / "ranks", rank=1)
    with shared.held(), own.held():
        own.step()
        node.poll()
        node.source.close()
        # This daemon has time for no pod, saves what it has read, and is killed.
        node.limits = LIMITS._replace(scan_s=-1.0)
        node.start().poll(time.time(), time.monotonic())
        node.limits = LIMITS
        node.source = node.start()
        node.poll()
        assert [(s.rank, sum(s.durations.counts)) for s in node.states()] == [(0, 0), (1, 1)]


def test_positions_of_before_there_were_pods_are_used(node: PodNode) -> None:
    ring = RingFile(node.folder.ranks)
    with ring.held():
        ring.step()
        node.poll()
        node.source.close()
        path = node.folder.path.parent / "positions.json"
        content = json.loads(path.read_text())
        for entry in content["ranks"]:
            del entry["pod"]
        path.write_text(json.dumps(content))
        node.source = node.start()
        node.poll()
        (state,) = node.states()
        assert sum(state.durations.counts) == 1


# All pods in one round, however busy the machine is.
@pytest.mark.parametrize("limits", [LIMITS._replace(scan_s=60)])
def test_a_pod_has_64_rings_whoever_owns_them(node: PodNode) -> None:
    node.mount(A, B)
    for rank in range(67):
        ring = RingFile(node.pod(A) / "ranks", rank=rank, world_size=100)
        if os.getuid() == 0:
            # Root in the container may do that.
            os.chown(ring.path, 1000 + rank, 1000)
    other = RingFile(node.pod(B) / "ranks", rank=99, world_size=100, job="other")
    node.poll()
    reason = "too_many_of_owner"
    assert dict(node.rejects) == {reason: 3}
    assert sum(state.pod_uid == A for state in node.states()) == 64
    assert other.path.stem in {path.stem for path in (node.pod(B) / "commands").iterdir()}


def test_a_pod_without_an_inbox_hears_what_to_mount(node: PodNode) -> None:
    node.mount(A)
    with RingFile(node.pod(A) / "ranks").held():
        node.poll()
        (rank,) = node.source.live()
        found = node.source.open_ring(rank)
        assert found is not None
        assert found[1].inbox_remedy == (
            f"mount {node.folder.inbox}/pods with subPathExpr $(POD_UID) at "
            "/var/lib/warpwatch/inbox"
        )
    node.poll()
    assert node.source.open_ring(rank) is None


@pytest.mark.parametrize("limits", [LIMITS._replace(rings=2)])
def test_the_limit_of_rings_is_one_for_all_folders(node: PodNode) -> None:
    node.mount(A, B)
    rings = [
        RingFile(ranks, rank=rank, world_size=3)
        for rank, ranks in enumerate(
            [node.folder.ranks, node.pod(A) / "ranks", node.pod(B) / "ranks"]
        )
    ]
    node.poll()
    assert dict(node.rejects) == {"too_many": 1}
    accepted = {state.rank for state in node.states()}
    (waiting,) = {0, 1, 2} - accepted
    with rings[waiting].held():
        # A ring of another folder has gone.
        node.poll(601)
        node.poll(602)
        assert [state.rank for state in node.states()] == [waiting]


@pytest.mark.parametrize("limits", [LIMITS._replace(rings=1)])
def test_a_ring_that_waits_for_room_is_counted_once(node: PodNode) -> None:
    rings = [RingFile(node.folder.ranks, rank=rank, world_size=3) for rank in range(3)]
    with rings[0].held(), rings[1].held(), rings[2].held():
        for at in (0, 601, 602):
            node.poll(at)
            assert dict(node.rejects) == {"too_many": 2}
        assert len(node.states()) == 1


@pytest.mark.parametrize("limits", [LIMITS._replace(rings=1)])
def test_an_ended_ring_gives_its_place_back_at_once_where_another_waits(node: PodNode) -> None:
    rings = [RingFile(node.folder.ranks, rank=rank, world_size=3) for rank in range(3)]
    for ring in rings:
        ring.step()
    for at in range(6):
        node.poll(at)
    assert [state.steps_total for state in node.states()] == [1, 1, 1]


@pytest.mark.parametrize("limits", [LIMITS._replace(rings=2)])
def test_a_rank_whose_ring_made_room_and_that_goes_on_is_followed(
    node: PodNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended, "MAX_RINGS_PER_OWNER", 1)
    about = {"world_size": 3, "run": "r1"}
    for rank in (0, 1):
        RingFile(node.folder.ranks, rank=rank, **about).step()
    node.poll(0)
    successor = RingFile(node.folder.ranks, rank=0, **about)
    with successor.held():
        node.poll(1)
        RingFile(node.folder.ranks, rank=2, **about).step()
        node.poll(2)
        successor.step()
        node.poll(3)
        live = [(one.rank, one.steps_total) for one in node.states() if one.status == "running"]
        assert [rank for rank, _ in live] == [0]


@pytest.mark.parametrize("limits", [LIMITS._replace(rings=1)])
def test_so_does_one_of_a_run_that_another_has_followed(node: PodNode) -> None:
    for at in range(0, 12, 3):
        ring = RingFile(node.folder.ranks)
        with ring.held():
            ring.step()
            node.poll(at)
            node.poll(at + 1)
            (state,) = node.states()
            assert (state.job, state.status, state.steps_total) == ("train", "running", 1)
        ring.word(protocol.WORD_ENDED, 1)
        node.poll(at + 2)
