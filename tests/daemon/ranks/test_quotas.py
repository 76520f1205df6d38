"""Who lays down too much is not captured, and the oldest of it in the inbox goes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.ranks.pod_node import A, B, PodNode
from warpwatch_daemon.config.sections import RendezvousConfig
from warpwatch_daemon.ranks import quotas
from warpwatch_daemon.ranks.quotas import Quotas

CONFIG = RendezvousConfig(owner_bytes=100 << 10)
USER = 1234
only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[PodNode]:
    node = PodNode(tmp_path)
    node.mount(A, B)
    yield node
    node.close()


@pytest.fixture
def measured(node: PodNode, monkeypatch: pytest.MonkeyPatch) -> Quotas:
    monkeypatch.setattr(quotas, "OWNER_FILES", 20)
    return Quotas(node.folder, CONFIG, lambda reason: node.rejects.update([reason]))


def fill(folder: Path, *names: str, kib: int = 40, uid: int = 0) -> None:
    for name in names:
        (folder / name).write_bytes(os.urandom(kib << 10))
        if uid:
            os.chown(folder / name, uid, uid)
        # The order in which they were made is the order of their times.
        time.sleep(0.02)


def test_the_oldest_files_of_a_pod_go_until_it_has_no_more_than_its_share(
    node: PodNode, measured: Quotas
) -> None:
    fill(node.inbox(A), "1", "2", "3", "4")
    # A date is what its owner likes.
    os.utime(node.inbox(A) / "4", (1, 1))
    fill(node.inbox(A), "5")
    fill(node.inbox(B), "1", "2")
    measured.measure()
    assert sorted(os.listdir(node.inbox(A))) == ["4", "5"]
    assert sorted(os.listdir(node.inbox(B))) == ["1", "2"]
    assert measured.excess(A) == "0.2 MiB in its inbox of 0.1 MiB (rendezvous.owner_bytes)"
    assert measured.excess(B) is None
    measured.measure()
    assert measured.excess(A) is None
    assert dict(node.rejects) == {"over_quota": 1}


def test_files_without_content_count(node: PodNode, measured: Quotas) -> None:
    for number in range(30):
        (node.inbox(A) / f"{number}.json").touch()
    measured.measure()
    assert measured.excess(A) == "more than 20 files"
    measured.measure()
    assert measured.excess(A) is None


def test_folders_in_an_inbox_go_first(node: PodNode, measured: Quotas) -> None:
    fill(node.inbox(A), "old")
    (node.inbox(A) / "a" / "b").mkdir(parents=True)
    fill(node.inbox(A) / "a" / "b", "1", "2", "3", kib=20)
    for _ in range(2):
        measured.measure()
    assert os.listdir(node.inbox(A)) in ([], ["old"])
    assert measured.excess(A) is None


def test_folders_too_deep_to_look_into_are_too_much(node: PodNode, measured: Quotas) -> None:
    (node.pod(A) / "ranks" / "1/2/3/4/5").mkdir(parents=True)
    measured.measure()
    assert measured.excess(A) == "folders that cannot be looked into"


def test_the_memory_of_the_rendezvous_has_a_share_of_its_own(
    node: PodNode, measured: Quotas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "FOLDER_BYTES", 1 << 20)
    fill(node.pod(A) / "ranks", "junk", kib=1200)
    fill(node.pod(B) / "ranks", "ring", kib=528)
    measured.measure()
    assert measured.excess(A) == "1.2 MiB in its rendezvous folder of 1.0 MiB"
    assert measured.excess(B) is None
    (node.pod(A) / "ranks" / "junk").unlink()
    measured.measure()
    assert measured.excess(A) is None


@only_root
def test_in_the_folders_of_all_each_user_pays_for_their_own_files(
    node: PodNode, measured: Quotas
) -> None:
    fill(node.folder.inbox, "theirs-1", "theirs-2", "theirs-3", uid=USER)
    fill(node.folder.inbox, "mine")
    measured.measure()
    assert measured.excess(USER) is not None
    assert measured.excess(0) is None
    assert sorted(os.listdir(node.folder.inbox)) == ["mine", "pods", "theirs-2", "theirs-3"]
    assert sorted(os.listdir(node.folder.inbox / "pods")) == sorted([A, B])


@only_root
def test_the_pods_inboxes_do_not_go_for_what_root_has_too_much_of(
    node: PodNode, measured: Quotas
) -> None:
    fill(node.folder.inbox, "1", "2", "3")
    measured.measure()
    assert sorted(os.listdir(node.folder.inbox)) == ["2", "3", "pods"]
    assert sorted(os.listdir(node.folder.inbox / "pods")) == sorted([A, B])


def test_pods_for_which_a_round_had_no_time_keep_what_was_measured(
    node: PodNode, measured: Quotas, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node.pod(A) / "ranks" / "1/2/3/4/5").mkdir(parents=True)
    measured.measure()
    monkeypatch.setattr(quotas, "LOOK_S", -1.0)
    measured.measure()
    assert measured.excess(A) == "folders that cannot be looked into"


COUNT = """
import os, sys
from pathlib import Path
from warpwatch_daemon.ranks.directory import Directory
from warpwatch_daemon.ranks.usage import Count
os.setuid(1234)
count = Count("pod")
count.add(Directory(Path(sys.argv[1])), 100)
print(count.by_owner["pod"].files, count.by_owner["pod"].is_hidden)
"""


@only_root
def test_a_folder_in_which_names_alone_can_be_seen_ends_no_count(open_path: Path) -> None:
    """Root without capabilities, as in the chart, is told no more of another user's files."""
    inbox = open_path / "inbox"
    (inbox / "closed").mkdir(parents=True)
    (inbox / "closed" / "x").touch()
    (inbox / "closed").chmod(0o744)
    for number in range(5):
        (inbox / f"file{number}").touch()
    command = [sys.executable, "-c", COUNT, str(inbox)]
    counted = subprocess.run(command, capture_output=True, text=True, check=True)
    # The folder, the name in it, and the files beside it, whichever was listed first.
    assert counted.stdout == "6 True\n"
