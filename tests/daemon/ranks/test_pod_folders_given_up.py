"""Folders of pods in the long run: which are served, kept and made again, and which go."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.daemon.ranks.sources import A, B, C, finds_daemon, made_later
from warpwatch_daemon.ranks.table import LIMITS

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
    node.mount(A)
    node.ring(A)
    node.poll()
    node.mount(B)
    node.pod(C).mkdir()
    made_later(node.pod(C), than=node.pod(B))
    node.mount(C)
    assert [finds_daemon(node.pod(uid)) for uid in (A, B, C)] == [True, False, True]
    node.poll()
    assert node.rejects == {"too_many_pods": 1}
    shutil.rmtree(node.pod(C))
    node.poll()
    node.poll()
    assert finds_daemon(node.pod(B))


def test_a_pod_that_trains_again_after_days_is_met_again(node):
    node.mount(A)
    ring = node.ring(A)
    node.poll()
    ring.die()
    for at_s in (1, 601, 1.1 * DAY_S, 2 * DAY_S, 3 * DAY_S):
        node.poll(at_s)
    assert finds_daemon(node.pod(A))
    node.ring(A)
    node.poll(3 * DAY_S + 1)
    assert [state.pod_uid for state in node.states()] == [A]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_an_empty_folder_that_cannot_be_served_goes_after_a_day(node):
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
def test_a_folder_that_is_not_served_goes_after_an_hour_with_rings_that_were_not_read(
    node, displaced
):
    (node.inbox(A) / "c-1.train.stacks.json").touch()
    (node.pod(A) / "ranks" / "train-r0-0123456789abcdef.ring").write_bytes(b"short")
    (node.pod(A) / "ranks" / "train-r0-0123456789abcdef.new").touch()
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
@pytest.mark.parametrize("left", ["notes.txt", "ranks/notes.txt", "more/socket"])
def test_what_a_pod_left_in_its_folder_stays_and_is_counted_once(node, displaced, left):
    (node.pod(A) / left).parent.mkdir(exist_ok=True)
    (node.pod(A) / left).write_text("mine")
    displaced()
    for at_s in (3900, 4000, 4100):
        node.poll(at_s)
    assert (node.pod(A) / left).read_text() == "mine"
    assert node.rejects["pod_leftovers"] == 1


@one_pod
def test_the_ring_of_a_process_that_lives_is_not_removed_where_no_room_is_left(node, displaced):
    displaced()
    ring = node.ring(A)
    command = node.pod(A) / "commands" / f"{ring.path.stem}.cmd"
    command.touch()
    node.poll(3900)
    assert ring.path.exists() and command.exists()
    assert node.rejects["pod_leftovers"] == 1


def test_a_rank_survives_a_day_without_a_daemon(node):
    node.mount(A)
    node.source.close()
    node.ring(A)
    node.source = node.start()
    for at_s in (DAY_S + 60, DAY_S + 180):
        node.poll(at_s)
    assert [state.pod_uid for state in node.states()] == [A]
    assert finds_daemon(node.pod(A))


def test_the_folder_of_a_rank_is_kept_young(node):
    node.mount(A, B)
    node.ring(A)
    node.poll()
    before = {uid: node.pod(uid).stat().st_ctime_ns for uid in (A, B)}

    def touched() -> list[bool]:
        return [node.pod(uid).stat().st_ctime_ns > before[uid] for uid in (A, B)]

    node.poll(3300)
    assert touched() == [False, False]
    made_later(node.folder.path, than=node.pod(A))
    node.poll(3900)
    assert touched() == [True, False]


def test_a_folder_that_was_made_again_is_served_again(node):
    node.mount(A)
    ring = node.ring(A)
    ring.step()
    node.poll()
    node.pod(A).rename(node.folder.path / "gone")
    ring.path = node.folder.path / "gone" / "ranks" / ring.path.name
    node.mount(A)
    assert finds_daemon(node.pod(A))
    ring.step()
    state = node.newest()
    assert (state.status, state.steps_total) == ("running", 2)


def test_a_pod_that_cleans_its_folder_up_gets_it_again(node):
    node.mount(A)
    shutil.rmtree(node.pod(A) / "ranks")
    (node.pod(A) / "daemon.lock").unlink()
    node.poll()
    node.poll(61)
    assert finds_daemon(node.pod(A))
    node.ring(A)
    node.poll(62)
    assert [state.pod_uid for state in node.states()] == [A]


def test_the_shared_inbox_and_those_of_pods_are_swept_of_what_is_older_than_an_hour(node):
    node.mount(A)
    shared, own = node.folder.inbox / "old.json", node.inbox(A) / "old.json"
    for file in (shared, own):
        file.touch()
        # The time of its content is what its owner likes.
        os.utime(file, (4.07e9, 4.07e9))
    node.inboxes.sweep(3600.0, node.began + 3300)
    assert shared.exists() and own.exists()
    node.inboxes.sweep(3600.0, node.began + 3900)
    assert os.listdir(node.inbox(A)) == []
    assert os.listdir(node.folder.inbox) == ["pods"]
