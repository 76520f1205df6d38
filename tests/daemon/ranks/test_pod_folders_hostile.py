"""What a pod does to its own folder, as root in its container may, it does to itself alone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.ranks.pod_node import A, B, C, PodNode
from tests.daemon.ranks.ring_files import RingFile
from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.directory import Directory
from warpwatch_daemon.ranks.ring_folder import PodFolder
from warpwatch_daemon.ranks.table import LIMITS, MAX_FILES_PER_POD, RingTable

NAME = "train-r0-0123456789abcdef"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[PodNode]:
    """Pod B is the good one: it has a rank that trains."""
    node = PodNode(tmp_path)
    node.mount(A, B)
    ring = RingFile(node.pod(B) / "ranks", job="good")
    with ring.held():
        ring.step()
        node.poll()
        yield node
        ring.step()
        node.poll(62)
        # Whatever happened meanwhile.
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


def test_a_link_in_place_of_a_pods_folder_is_not_followed(node: PodNode, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (node.folder.path / "pods" / C).symlink_to(tmp_path / "elsewhere")
    node.poll()
    node.poll(61)
    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("name", ["ranks", "commands"])
def test_a_link_to_another_pods_folder_is_not_followed(node: PodNode, name: str) -> None:
    before = sorted(os.listdir(node.pod(B) / name))
    replace(node.pod(A) / name).symlink_to(node.pod(B) / name)
    for later_s in (0, 61, 25 * 3600):
        node.poll(later_s)
    assert sorted(os.listdir(node.pod(B) / name)) == before
    assert (node.pod(A) / name).is_symlink()
    # Of the ring that lies in the other pod's folder it has nothing.
    assert {state.pod_uid for state in node.states()} == {B}
    assert node.rejects["pod_unusable"] == 1


def test_a_link_that_is_there_before_the_daemon_comes_is_not_followed(node: PodNode) -> None:
    node.pod(C).mkdir()
    (node.pod(C) / "ranks").symlink_to(node.pod(B) / "ranks")
    node.poll()
    node.poll(61)
    assert node.rejects["pod_unusable"] == 1
    assert not (node.pod(C) / "daemon.lock").exists()


def test_a_link_in_place_of_an_inbox_is_not_followed(node: PodNode, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "c-1.json").write_text("{}")
    os.utime(secret / "c-1.json", (1, 1))
    replace(node.inbox(A)).symlink_to(secret)
    with pytest.raises(inbox.InboxError):
        place = Directory(node.folder.inbox) / "pods" / A
        inbox.take(place, "c-1.json", os.getuid(), tmp_path / "taken")
    node.inboxes.sweep(3600.0, time.time())
    assert (secret / "c-1.json").read_text() == "{}"


@pytest.mark.parametrize("target", ["/etc/hostname", "../../{B}/daemon.lock"])
def test_a_link_in_place_of_a_command_file_is_not_written_through(
    node: PodNode, target: str
) -> None:
    commands = node.pod(A) / "commands"
    (commands / f"{NAME}.cmd").symlink_to(target.format(B=B))
    ring = RingFile(node.pod(A) / "ranks")
    ring.path = ring.path.rename(node.pod(A) / "ranks" / f"{NAME}.ring")
    node.poll()
    assert dict(node.rejects) == {"no_command_file": 1}
    # Asked again at every poll, it would be counted at every poll.
    node.poll()
    assert dict(node.rejects) == {"no_command_file": 1}
    (commands / f"{NAME}.cmd").unlink()


@pytest.mark.parametrize("name", ["daemon.lock", "commands"])
def test_a_pipe_in_place_of_what_the_daemon_made_holds_no_one_up(node: PodNode, name: str) -> None:
    os.mkfifo(replace(node.pod(A) / name))
    for later_s in (0, 61, 122):
        node.poll(later_s)
    assert node.rejects["pod_unusable"] == 1


@pytest.mark.parametrize(
    "said",
    ["[" * 4096, '{"version": "1\\nERROR forged", "pid": 1, "uid": ' + "9" * 200 + "}"],
    ids=["deep", "forged"],
)
def test_what_a_pod_writes_into_its_lock_costs_and_says_nothing(
    node: PodNode, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    node.pod(C).mkdir()
    node.inbox(C).mkdir()
    holder = RingFile(node.pod(A))
    holder.path = replace(node.pod(A) / "daemon.lock")
    holder.path.write_text(said)
    with holder.held():
        node.poll(61)
        node.poll(62)
    assert node.rejects["pod_unusable"] == 1
    # The one that is older is served after it.
    assert C in node.served()
    assert not [text for text in caplog.messages if "\n" in text or len(text) > 300]


@pytest.mark.parametrize("work", ["scan", "hold", "remove"])
def test_a_fault_of_ours_with_one_pod_costs_that_pod_alone(
    node: PodNode, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    where = {"scan": RingTable, "hold": PodFolder, "remove": PodFolder}[work]
    right = getattr(where, work)

    def wrong(self: Any, *args: Any) -> Any:
        if A in (getattr(self, "_pod_uid", None), getattr(self, "_uid", None)):
            raise RecursionError("too deep")
        return right(self, *args)

    monkeypatch.setattr(where, work, wrong)
    if work == "hold":
        replace(node.pod(A) / "daemon.lock")
    if work == "remove":
        node.limits = LIMITS._replace(pods=1)
        node.source.close()
        node.source = node.start()
        with RingFile(node.pod(B) / "ranks", job="first").held():
            os.utime(node.pod(B))
            for later_s in (0, 7300, 7400):
                node.poll(later_s)
    for later_s in (0, 61, 62):
        node.poll(later_s)
    assert node.rejects["pod_unusable"] == 1


def test_a_file_name_makes_no_line_of_the_log(
    node: PodNode, caplog: pytest.LogCaptureFixture
) -> None:
    (node.pod(A) / "ranks" / "a\nERROR forged").touch()
    node.poll()
    assert node.rejects["bad_name"] == 1
    assert not [text for text in caplog.messages if "\n" in text]


def test_pipes_and_devices_in_place_of_files_are_not_opened(node: PodNode) -> None:
    ranks, commands = node.pod(A) / "ranks", node.pod(A) / "commands"
    os.mkfifo(ranks / f"{NAME}.ring")
    ring = RingFile(ranks)
    os.mkfifo(commands / f"{ring.path.stem}.cmd")
    expected = {"not_regular": 1, "no_command_file": 1}
    if os.getuid() == 0:
        # The tape drive, of which there is none: opening it would be an error of another name.
        os.mknod(ranks / f"{NAME[:-1]}0.ring", 0o600 | 0o020000, os.makedev(9, 0))
        expected["not_regular"] = 2
    node.poll()
    assert dict(node.rejects) == expected


def test_a_ring_that_became_a_folder_is_forgotten_all_the_same(node: PodNode) -> None:
    ring = RingFile(node.pod(A) / "ranks", job="odd")
    node.poll()
    replace(ring.path).mkdir()
    node.poll(601)
    node.poll(602)
    assert ring.path.is_dir()
    assert "odd" not in {state.job for state in node.source.states(time.monotonic())}


def test_a_ring_whose_folder_went_away_is_read_to_its_end(node: PodNode) -> None:
    ring = RingFile(node.pod(A) / "ranks", job="away")
    with ring.held():
        node.poll()
        shutil.rmtree(node.pod(A))
        node.poll()
        assert [s.status for s in node.states() if s.job == "away"] == ["running"]
    node.poll()
    assert [s.status for s in node.states() if s.job == "away"] == ["died"]
    node.poll(601)


def test_ten_thousand_files_cost_a_bounded_look(node: PodNode) -> None:
    ranks = node.pod(A) / "ranks"
    for number in range(10_000):
        (ranks / f"junk-r0-{number:016x}.ring").write_bytes(b"")
    node.mount(C)
    good = RingFile(node.pod(C) / "ranks", job="later")
    with good.held():
        good.step()
        # A look that takes long ends the poll's share of looking; the next poll goes on with it.
        node.poll()
        node.poll()
        assert "later" in {state.job for state in node.states()}
    assert node.rejects["too_many_files"] >= 1
    assert 0 < node.rejects["wrong_size"] <= 2 * MAX_FILES_PER_POD


def test_a_folder_or_lock_of_another_owner_is_not_served(node: PodNode) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    node.pod(C).mkdir()
    os.chown(node.pod(C), 1234, 1234)
    node.poll()
    node.poll(61)
    assert node.rejects["pod_unusable"] == 1
    assert os.listdir(node.pod(C)) == []


def test_a_squatter_in_the_shared_inbox_keeps_no_pod_from_the_daemon(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    (tmp_path / "inbox" / "pods").mkdir(parents=True)
    os.chown(tmp_path / "inbox" / "pods", 1234, 1234)
    node = PodNode(tmp_path)
    node.pod(A).mkdir(parents=True)
    node.poll()
    assert node.served() == {A}
    assert dict(node.rejects) == {"pods_unusable": 1}
    # It is swept like all that is not collected, and then there is room for the daemon's.
    node.inboxes.sweep(3600.0, time.time() + 4000)
    node.poll(61)
    assert node.inbox(A).is_dir()
    node.close()


def test_a_sequence_number_at_its_end_goes_on_from_one(node: PodNode) -> None:
    ring = RingFile(node.pod(A) / "ranks", job="end")
    with ring.held():
        node.poll()
        command = node.pod(A) / "commands" / f"{ring.path.stem}.cmd"
        with command.open("r+b") as file:
            os.pwrite(file.fileno(), b"\xff" * 8, 8)
        (rank,) = (one for one in node.source.live() if one.job.name == "end")
        found = node.source.open_ring(rank)
        assert found is not None
        opened, folder = found
        folder.commands.send(opened.name, {"op": "cancel", "id": "c-1"})
        assert command.read_bytes()[8:16] == (1).to_bytes(8, "little")
