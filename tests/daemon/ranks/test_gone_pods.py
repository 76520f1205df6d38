"""What a pod leaves goes with it, as far as the kubelet says that it is gone."""

from __future__ import annotations

import os

import pytest

from tests.daemon.ranks.sources import A, B, RankNode
from warpwatch_daemon.ranks import gone_pods
from warpwatch_daemon.ranks.gone_pods import GonePods
from warpwatch_telemetry.attribution import Pod

POD = Pod("team", "train")


class Kubelet:
    """The folders of the pods A and B, and which of them (``pods``) the kubelet has."""

    def __init__(self, node: RankNode) -> None:
        self.pods: dict[str, Pod] | None = {A: POD, B: POD}
        self.node = node
        node.mount(A, B)
        self.gone = GonePods(node.folder, lambda: self.pods, node.clock.monotonic)
        self.gone.sweep(0.0)

    def left(self, at: float, pods: dict[str, Pod] | None) -> set[str]:
        """What is left after a sweep at this time: pods' folders, and those on their way out."""
        self.pods = pods
        self.gone.sweep(at)
        folder = self.node.folder
        return {*os.listdir(folder.path / "pods"), *os.listdir(folder.inbox / "pods")}


@pytest.fixture
def kubelet(node):
    return Kubelet(node)


ONE, BOTH = {B: POD}, {A: POD, B: POD}


@pytest.mark.parametrize(
    ("said", "last_s"),
    [
        ([(60, ONE)], 660),
        # It is seen again: gone for ten minutes from then.
        ([(60, ONE), (500, BOTH), (560, ONE)], 1160),
        # Nothing is removed while the kubelet cannot be read.
        ([(60, ONE), (500, None), (1000, None), (1060, ONE)], 1660),
    ],
)
def test_what_a_gone_pod_left_is_removed_after_ten_minutes(node, kubelet, said, last_s):
    node.file(A)
    deep = node.pod(A) / "left" / "deep" / "er"
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(bytes(1000))
    (node.inbox(A) / "never-collected.json").touch()
    for at, pods in (*said, (last_s - 1, ONE)):
        assert kubelet.left(at, pods) == {A, B}
    assert kubelet.left(last_s, ONE) == {B}
    node.poll()
    assert node.served() == {B}


def test_the_folder_of_a_process_that_lives_stays(node, kubelet):
    ring = node.ring(A)
    kubelet.left(60.0, ONE)
    kubelet.left(700.0, ONE)
    assert ring.path.exists()
    ring.die()
    assert kubelet.left(760.0, ONE) == {B}


def test_an_inbox_whose_folder_did_not_survive_a_reboot_goes_too(node, kubelet):
    node.pod(A).rename(node.folder.path / "lost")
    kubelet.left(60.0, ONE)
    assert kubelet.left(660.0, ONE) == {B}


def test_what_there_was_no_time_for_goes_in_the_next_round(node, kubelet, monkeypatch):
    monkeypatch.setattr(gone_pods, "REMOVE_S", -1.0)
    kubelet.left(60.0, ONE)
    left = kubelet.left(660.0, ONE) - {B}
    assert A not in left
    assert len(left) == 2
    monkeypatch.setattr(gone_pods, "REMOVE_S", 2.0)
    # Also of a daemon that was started since.
    kubelet.gone = GonePods(node.folder, lambda: ONE, node.clock.monotonic)
    assert kubelet.left(0.0, ONE) == {B}
