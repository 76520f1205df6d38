"""Folders of pods in the long run: which are served, kept and made again, and which go."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.ranks.pod_node import A, B, C, PodNode, finds_daemon
from tests.daemon.ranks.ring_files import RingFile
from warpwatch_daemon.ranks.table import LIMITS, Limits

DAY_S = 24 * 3600.0
one_pod = pytest.mark.parametrize("limits", [LIMITS._replace(pods=1)])


@pytest.fixture
def limits() -> Limits:
    return LIMITS


@pytest.fixture
def node(tmp_path: Path, limits: Limits) -> Iterator[PodNode]:
    node = PodNode(tmp_path, limits)
    yield node
    node.close()


@pytest.mark.parametrize("limits", [LIMITS._replace(pods=2)])
def test_the_newest_folders_are_served_and_none_with_a_rank_is_given_up(node: PodNode) -> None:
    node.mount(A)
    ring = RingFile(node.pod(A) / "ranks")
    with ring.held():
        node.poll()
        node.mount(B)
        time.sleep(0.02)
        node.mount(C)
        assert (finds_daemon(node.pod(B)), finds_daemon(node.pod(C))) == (False, True)
        assert finds_daemon(node.pod(A))
        node.poll()
        assert dict(node.rejects) == {"too_many_pods": 1}
        shutil.rmtree(node.pod(C))
        node.poll()
        node.poll()
        assert finds_daemon(node.pod(B))


def displace(node: PodNode) -> None:
    """Serve pod B in the place of pod A, where there is room for one."""
    time.sleep(0.02)
    node.mount(B)
    assert finds_daemon(node.pod(B))


def test_a_pod_that_trains_again_after_days_is_met_again(node: PodNode) -> None:
    node.mount(A)
    with RingFile(node.pod(A) / "ranks").held():
        node.poll()
    node.poll(601)
    for days in (1.1, 2, 3):
        node.poll(days * DAY_S)
    assert finds_daemon(node.pod(A))
    with RingFile(node.pod(A) / "ranks").held():
        node.poll(3 * DAY_S + 1)
        assert [state.pod_uid for state in node.states()] == [A]


def test_an_empty_folder_that_cannot_be_served_goes_after_a_day(node: PodNode) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    node.poll()
    node.pod(A).mkdir()
    os.chown(node.pod(A), 1234, 1234)
    node.poll(DAY_S - 60)
    assert node.pod(A).exists()
    node.poll(DAY_S + 60)
    assert not node.pod(A).exists()


@one_pod
def test_a_ring_that_could_not_be_read_goes_with_its_folder_and_its_inbox_is_swept(
    node: PodNode,
) -> None:
    node.mount(A)
    (node.inbox(A) / "c-1.train.stacks.json").touch()
    (node.pod(A) / "ranks" / "train-r0-0123456789abcdef.ring").write_bytes(b"short")
    (node.pod(A) / "ranks" / "train-r0-0123456789abcdef.new").touch()
    displace(node)
    node.poll(3700)
    assert not node.pod(A).exists()
    assert os.listdir(node.inbox(A)) == ["c-1.train.stacks.json"]
    node.inboxes.sweep(3600.0, time.time() + DAY_S + 60)
    assert not node.inbox(A).exists()


@one_pod
@pytest.mark.parametrize("left", ["notes.txt", "ranks/notes.txt"])
def test_what_a_pod_left_in_its_folder_stays_and_is_counted_once(node: PodNode, left: str) -> None:
    node.mount(A)
    (node.pod(A) / left).write_text("mine")
    displace(node)
    for later_s in (3700, 3800, 3900):
        node.poll(later_s)
    assert (node.pod(A) / left).read_text() == "mine"
    assert node.rejects["pod_leftovers"] == 1


@one_pod
def test_a_folder_that_is_not_served_goes_after_an_hour(node: PodNode) -> None:
    node.mount(A)
    time.sleep(0.02)
    node.mount(B)
    node.poll(3500)
    assert node.pod(A).exists()
    node.poll(3700)
    assert not node.pod(A).exists()
    assert finds_daemon(node.pod(B))


def test_a_rank_survives_a_day_without_a_daemon(node: PodNode) -> None:
    node.mount(A)
    node.source.close()
    with RingFile(node.pod(A) / "ranks").held():
        node.source = node.start()
        for later_s in (DAY_S + 60, DAY_S + 180):
            node.poll(later_s)
        assert [state.pod_uid for state in node.states()] == [A]
        assert finds_daemon(node.pod(A))


@one_pod
def test_the_ring_of_a_process_that_lives_is_not_removed_where_no_room_is_left(
    node: PodNode,
) -> None:
    node.mount(A)
    time.sleep(0.02)
    node.mount(B)
    ring = RingFile(node.pod(A) / "ranks")
    command = node.pod(A) / "commands" / f"{ring.path.stem}.cmd"
    command.touch()
    with ring.held():
        node.poll(3700)
        assert ring.path.exists()
        assert command.exists()
        assert node.rejects["pod_leftovers"] == 1


def test_the_folder_of_a_rank_is_kept_young(node: PodNode) -> None:
    node.mount(A, B)
    ring = RingFile(node.pod(A) / "ranks")
    with ring.held():
        node.poll()
        before = {uid: node.pod(uid).stat().st_ctime_ns for uid in (A, B)}
        node.poll(3500)
        assert node.pod(A).stat().st_ctime_ns == before[A]
        node.poll(3700)
        assert node.pod(A).stat().st_ctime_ns > before[A]
        assert node.pod(B).stat().st_ctime_ns == before[B]


def test_a_folder_that_was_made_again_is_served_again(node: PodNode) -> None:
    node.mount(A)
    ring = RingFile(node.pod(A) / "ranks")
    with ring.held():
        ring.step()
        node.poll()
        node.pod(A).rename(node.folder.path / "gone")
        ring.path = node.folder.path / "gone" / "ranks" / ring.path.name
        node.mount(A)
        assert finds_daemon(node.pod(A))
        ring.step()
        node.poll()
        (state,) = node.states()
        assert (state.status, state.steps_total) == ("running", 2)


def test_a_pod_that_cleans_its_folder_up_gets_it_again(node: PodNode) -> None:
    node.mount(A)
    shutil.rmtree(node.pod(A) / "ranks")
    (node.pod(A) / "daemon.lock").unlink()
    node.poll()
    node.poll(61)
    assert finds_daemon(node.pod(A))
    ring = RingFile(node.pod(A) / "ranks")
    with ring.held():
        node.poll(62)
        assert [state.pod_uid for state in node.states()] == [A]


def test_the_sweep_of_the_shared_inbox_leaves_the_pods_and_theirs_are_swept(node: PodNode) -> None:
    node.mount(A)
    (node.inbox(A) / "old.json").touch()
    (node.folder.inbox / "old.json").touch()
    time.sleep(0.5)
    (node.inbox(A) / "new.json").touch()
    node.inboxes.sweep(0.4, time.time())
    assert os.listdir(node.inbox(A)) == ["new.json"]
    assert os.listdir(node.folder.inbox) == ["pods"]


def test_an_inbox_goes_a_day_after_its_pod(node: PodNode) -> None:
    # The rendezvous is in memory and the inbox on a disk: only that survives a reboot.
    node.mount(A)
    node.inbox(B).mkdir()
    node.inboxes.sweep(3600.0, time.time() + DAY_S - 60)
    assert sorted(os.listdir(node.folder.inbox / "pods")) == [A, B]
    node.inboxes.sweep(3600.0, time.time() + DAY_S + 60)
    assert os.listdir(node.folder.inbox / "pods") == [A]
