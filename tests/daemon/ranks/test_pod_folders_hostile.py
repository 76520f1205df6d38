"""Pods that damage their own folder, as root in the container may, harm only themselves."""

import os
import shutil
from pathlib import Path

import pytest

from tests.daemon.ranks.sources import A, B, C, RankNode
from warpwatch_capturing.participant import FetchError
from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.folder import PodFolder
from warpwatch_daemon.ranks.table import RingTable
from warpwatch_runtime.directory import Directory

NAME = "train-r0-0123456789abcdef"


@pytest.fixture
def node(tmp_path):
    """Pod B is the good one: it has a rank that trains all the time."""
    node = RankNode(tmp_path)
    node.mount(A, B)
    ring = node.met(B, job="good", steps=1)
    yield node
    ring.step()
    node.poll(62)
    good = [state for state in node.states() if state.job == "good"]
    assert [(s.pod_uid, s.status, s.steps_total) for s in good] == [(B, "running", 2)]
    node.close()


def replace(path: Path) -> Path:
    """Take the folder or file away; the path is free then."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return path


@pytest.mark.parametrize("name", ["ranks", "commands"])
def test_a_link_to_another_pods_folder_is_not_followed(node, name):
    before = sorted(os.listdir(node.pod(B) / name))
    replace(node.pod(A) / name).symlink_to(node.pod(B) / name)
    # One that is there before the daemon comes, too, and one in place of all of a pod's folder.
    node.pod(C).mkdir()
    (node.pod(C) / name).symlink_to(node.pod(B) / name)
    (node.folder.path / "pods" / C.replace("1", "2")).symlink_to(node.pod(B))
    node.poll(0, 30, 61)
    assert sorted(os.listdir(node.pod(B) / name)) == before
    assert (node.pod(A) / name).is_symlink()
    # They have nothing of the ring in the other pod's folder.
    assert {state.pod_uid for state in node.states()} == {B}
    assert node.rejects["pod_unusable"] == 2
    assert not (node.pod(C) / "daemon.lock").exists()


def test_a_link_in_place_of_an_inbox_is_not_followed(node, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "c-1.json").write_text("{}")
    replace(node.inbox(A)).symlink_to(secret)
    with pytest.raises(FetchError):
        place = Directory(node.folder.inbox) / "pods" / A
        inbox.copy_out(place, "c-1.json", os.getuid(), tmp_path / "taken")
    node.inboxes.sweep(3600.0, node.began + 7200)
    assert (secret / "c-1.json").read_text() == "{}"


@pytest.mark.parametrize("squat", ["/etc/hostname", f"../../{B}/daemon.lock", None])
def test_a_link_or_pipe_in_place_of_a_command_file_is_not_written_to(node, squat):
    command = node.pod(A) / "commands" / f"{NAME}.cmd"
    if squat is None:
        os.mkfifo(command)
    else:
        command.symlink_to(squat)
    ring = node.file(A)
    ring.path.rename(node.pod(A) / "ranks" / f"{NAME}.ring")
    node.poll()
    assert node.rejects == {"no_command_file": 1}
    # It is tried again after half a minute, and counted once.
    command.unlink()
    node.poll(29)
    assert not command.exists()
    node.poll(31)
    assert command.is_file()
    assert node.rejects == {"no_command_file": 1}


@pytest.mark.parametrize("name", ["daemon.lock", "commands"])
def test_a_pipe_in_place_of_what_the_daemon_made_holds_no_one_up(node, name):
    os.mkfifo(replace(node.pod(A) / name))
    node.poll(0, 61)
    assert node.rejects["pod_unusable"] == 1


@pytest.mark.parametrize(
    "said",
    ["[" * 4096, '{"version": "1\\nERROR forged", "pid": 1, "uid": ' + "9" * 200 + "}"],
    ids=["deep", "forged"],
)
def test_what_a_pod_writes_into_its_lock_costs_and_says_nothing(node, caplog, said):
    node.pod(C).mkdir()
    holder = node.file(A)
    holder.path = replace(node.pod(A) / "daemon.lock")
    holder.path.write_text(said)
    node.hold(holder)
    node.poll(61)
    assert node.rejects["pod_unusable"] == 1
    # The one that is older is served after it.
    assert C in node.served()
    assert not [text for text in caplog.messages if "\n" in text or len(text) > 300]


@pytest.mark.parametrize("work", ["scan", "hold"])
def test_a_fault_of_ours_with_one_pod_costs_that_pod_alone(node, monkeypatch, work):
    where = RingTable if work == "scan" else PodFolder
    right = getattr(where, work)

    def wrong(self, *args):
        if (self._pod_uid if work == "scan" else self.folder.path.name) == A:
            raise RecursionError("too deep")
        return right(self, *args)

    monkeypatch.setattr(where, work, wrong)
    if work == "hold":
        replace(node.pod(A) / "daemon.lock")
    for _ in range(2):
        node.clock.advance(30.5)
        node.poll()
    assert node.rejects["pod_unusable"] == 1


def test_a_ring_that_became_a_folder_is_forgotten_all_the_same(node):
    ring = node.file(A, job="odd")
    node.poll()
    replace(ring.path).mkdir()
    node.poll(601, 602)
    assert ring.path.is_dir()
    assert "odd" not in {state.job for state in node.states()}


def test_a_ring_whose_folder_went_away_is_read_to_its_end(node):
    ring = node.met(A, job="away")
    shutil.rmtree(node.pod(A))
    node.poll()
    assert [s.status for s in node.states() if s.job == "away"] == ["running"]
    ring.die()
    node.poll()
    assert [s.status for s in node.states() if s.job == "away"] == ["died"]


def test_too_many_files_cost_a_bounded_look(node):
    ranks = node.pod(A) / "ranks"
    for number in range(1524):
        (ranks / f"junk-r0-{number:016x}.ring").touch()
        if number == 1023:
            node.poll()
            assert node.rejects == {"wrong_size": 1024}
    node.met(C, job="later", steps=1)
    assert "later" in {state.job for state in node.states()}
    assert node.rejects["too_many_files"] >= 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_squatter_in_the_shared_inbox_keeps_no_pod_from_the_daemon(tmp_path):
    (tmp_path / "inbox" / "pods").mkdir(parents=True)
    os.chown(tmp_path / "inbox" / "pods", 1234, 1234)
    node = RankNode(tmp_path)
    node.pod(A).mkdir(parents=True)
    node.poll()
    assert node.served() == {A}
    assert node.rejects == {"pods_unusable": 1}
    # It is swept like all that is not collected, and then there is room for the daemon's.
    node.inboxes.sweep(3600.0, node.began + 4000)
    node.poll(61)
    assert node.inbox(A).is_dir()
    (node.folder.inbox / "pods").rename(node.folder.inbox / "away").with_name("pods").touch()
    node.poll(121, 182)
    assert node.rejects == {"pods_unusable": 2}
    node.close()


def test_a_sequence_number_at_its_end_goes_on_from_one(node):
    ring = node.met(A, job="end")
    command = node.pod(A) / "commands" / f"{ring.path.stem}.cmd"
    with command.open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff" * 8, 8)
    (rank,) = (one for one in node.source.live() if one.job.name == "end")
    opened, folder = node.source.open_ring(rank)
    folder.commands.send(opened.name, {"op": "cancel", "id": "c-1"})
    assert command.read_bytes()[8:16] == (1).to_bytes(8, "little")
