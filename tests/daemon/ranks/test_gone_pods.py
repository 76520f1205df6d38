"""What a pod leaves goes with it, as far as the kubelet says that it is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.ranks.pod_node import A, B, PodNode
from tests.daemon.ranks.ring_files import RingFile
from warpwatch_daemon.ranks import gone_pods
from warpwatch_daemon.ranks.gone_pods import GonePods
from warpwatch_telemetry.attribution import Pod

POD = Pod("team", "train")


class Node:
    """A node with the pods A and B; pods: those that the kubelet has."""

    def __init__(self, path: Path) -> None:
        self.pods: dict[str, Pod] | None = {A: POD, B: POD}
        self.node = PodNode(path, known_pods=lambda: self.pods)
        self.node.mount(A, B)
        self.gone = GonePods(self.node.folder, lambda: self.pods)
        self.gone.sweep(0.0)

    def left(self) -> set[str]:
        """The pods that still have a folder or an inbox, and folders on their way out."""
        folder = self.node.folder
        return {*os.listdir(folder.path / "pods"), *os.listdir(folder.inbox / "pods")}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.node.close()


def test_what_a_gone_pod_left_is_removed_after_ten_minutes(node: Node) -> None:
    RingFile(node.node.pod(A) / "ranks")
    (node.node.pod(A) / "ranks" / "deep" / "er").mkdir(parents=True)
    (node.node.pod(A) / "ranks" / "deep" / "er" / "file").write_bytes(bytes(1000))
    (node.node.inbox(A) / "never-collected.json").touch()
    node.pods = {B: POD}
    node.gone.sweep(60.0)
    node.gone.sweep(659.0)
    assert node.left() == {A, B}
    node.gone.sweep(660.0)
    assert node.left() == {B}
    node.node.poll()
    assert node.node.served() == {B}


def test_a_pod_that_is_seen_again_is_gone_for_ten_minutes_from_then(node: Node) -> None:
    for at, pods in ((60.0, {B: POD}), (500.0, {A: POD, B: POD}), (560.0, {B: POD})):
        node.pods = pods
        node.gone.sweep(at)
    node.gone.sweep(1159.0)
    assert node.left() == {A, B}
    node.gone.sweep(1160.0)
    assert node.left() == {B}


def test_nothing_is_removed_while_the_kubelet_cannot_be_read(node: Node) -> None:
    node.pods = {B: POD}
    node.gone.sweep(60.0)
    node.pods = None
    for at in (500.0, 1000.0):
        node.gone.sweep(at)
    node.pods = {B: POD}
    node.gone.sweep(1060.0)
    assert node.left() == {A, B}
    node.gone.sweep(1660.0)
    assert node.left() == {B}


def test_the_folder_of_a_process_that_lives_stays(node: Node) -> None:
    node.pods = {B: POD}
    ring = RingFile(node.node.pod(A) / "ranks")
    with ring.held():
        node.gone.sweep(60.0)
        node.gone.sweep(700.0)
        assert ring.path.exists()
    node.gone.sweep(760.0)
    assert node.left() == {B}


def test_an_inbox_whose_folder_did_not_survive_a_reboot_goes_too(node: Node) -> None:
    (node.node.pod(A)).rename(node.node.folder.path / "lost")
    node.pods = {B: POD}
    node.gone.sweep(60.0)
    node.gone.sweep(660.0)
    assert node.left() == {B}


def test_what_there_was_no_time_for_goes_in_the_next_round(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gone_pods, "REMOVE_S", -1.0)
    node.pods = {B: POD}
    node.gone.sweep(60.0)
    node.gone.sweep(660.0)
    left = node.left() - {B}
    assert A not in left
    assert len(left) == 2
    monkeypatch.setattr(gone_pods, "REMOVE_S", 2.0)
    # Also of a daemon that was started since.
    GonePods(node.node.folder, lambda: node.pods).sweep(0.0)
    assert node.left() == {B}


def test_a_file_dated_2099_is_swept_like_any_other(node: Node) -> None:
    path = node.node.inbox(A) / "never-collected.json"
    shared = node.node.folder.inbox / "never-collected.json"
    for file in (path, shared):
        file.touch()
        os.utime(file, (4.07e9, 4.07e9))
    node.node.inboxes.sweep(3600.0, time.time() + 3500)
    assert path.exists()
    node.node.inboxes.sweep(3600.0, time.time() + 3700)
    assert not path.exists()
    assert not shared.exists()
