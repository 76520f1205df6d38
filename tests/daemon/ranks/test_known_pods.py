"""Pods of the kubelet: owners of their rings, and removal after the pod."""

import os
from unittest.mock import Mock

import pytest

from tests.daemon.ranks.sources import A, B, RankNode
from tests.manual_clock import ManualClock
from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.inbox import GonePods
from warpwatch_daemon.ranks.pods import UNKNOWN_S
from warpwatch_daemon.state.hub import Hub
from warpwatch_detection.engine import CONFIRM_S
from warpwatch_telemetry.records import RankSeen
from warpwatch_telemetry.samples import Attribution, Pod

OWN = f"uid/{os.getuid()}"
TEAM = {A: Pod("team", "train-0")}
ONE = {B: Pod("others", "train-1")}
BOTH = TEAM | ONE


@pytest.fixture
def known_pods():
    """The kubelet returns the pods that it has, or None where it is not readable."""
    return Mock(return_value=ONE)


def owners(node: RankNode) -> dict[str, str]:
    return {rank.job.name: rank.ring.owner for rank in node.source.live() if rank.ring}


def test_a_job_belongs_to_the_namespace_of_its_pod_whatever_it_claims(node):
    node.mount(B)
    node.ring(B, job="in-a-pod", pod_uid=A, owner="ns/kube-system")
    node.ring(job="shared", pod_uid=B)
    seen = {one.job: (one.pod, one.pod_uid) for one in node.poll() if isinstance(one, RankSeen)}
    assert owners(node) == {"in-a-pod": "ns/others", "shared": OWN}
    assert seen == {"in-a-pod": ("train-1", B), "shared": ("", "")}


def test_a_ring_waits_for_the_kubelet_to_know_its_pod(node, known_pods):
    node.ring(A, job="early")
    node.poll(14)
    assert owners(node) == {}
    known_pods.return_value = TEAM
    node.poll(14.5)
    # Its ranks report before detection takes them for ended.
    assert UNKNOWN_S < CONFIRM_S
    assert owners(node) == {"early": "ns/team"}
    # The first owner stays.
    known_pods.return_value = {}
    node.poll(40)
    assert owners(node) == {"early": "ns/team"}
    assert node.rejects == {}


@pytest.mark.parametrize("pods", [{}, None])
def test_a_ring_whose_pod_stays_unknown_belongs_to_its_user(node, known_pods, pods):
    known_pods.return_value = pods
    node.mount(B)  # It has no ring.
    node.ring(A, job="stray")
    for at_s in (16, 40):
        node.poll(at_s)
        assert owners(node) == {"stray": OWN}
    assert node.rejects == {"unknown_pod": 1}


def test_counts_saved_before_a_restart_wait_with_the_ring(node, known_pods):
    known_pods.return_value = TEAM
    node.met(A, job="again", steps=1)
    known_pods.return_value = None
    node.restart()
    node.poll(2, 4)
    known_pods.return_value = TEAM
    node.poll(6)
    assert [state.steps_total for state in node.states()] == [1]
    assert owners(node) == {"again": "ns/team"}


def test_what_the_kubelet_had_is_believed_for_fifteen_seconds():
    clock = ManualClock()
    hub = Hub(4.0, monotonic=clock.monotonic)
    assert hub.pods() is None
    hub.publish_attribution(Attribution("kubelet", clock.wall()))
    hub.publish_attribution(Attribution("pod_logs", clock.wall(), pods=TEAM))
    hub.publish_attribution(Attribution("slurm", clock.wall()))
    clock.advance(15.0)
    assert hub.pods() == TEAM
    clock.advance(0.1)
    assert hub.pods() is None


@pytest.fixture
def left(node, known_pods):
    """Sweep at a time with these pods: the folders of pods and those on their way out then."""
    node.mount(A, B)
    known_pods.return_value = BOTH
    gone = GonePods(node.folder, known_pods, frozenset, node.clock.monotonic)
    gone.sweep(0.0)

    def left(at: float, pods: dict[str, Pod] | None, gone: GonePods = gone) -> set[str]:
        known_pods.return_value = pods
        gone.sweep(at)
        folder = node.folder
        return {*os.listdir(folder.path / "pods"), *os.listdir(folder.inbox / "pods")}

    return left


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
def test_what_a_gone_pod_left_is_removed_after_ten_minutes(node, left, said, last_s):
    node.file(A)
    deep = node.pod(A) / "left" / "deep" / "er"
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(bytes(1000))
    (node.inbox(A) / "never-collected.json").touch()
    for at, pods in (*said, (last_s - 1, ONE)):
        assert left(at, pods) == {A, B}
    assert left(last_s, ONE) == {B}
    node.poll()
    assert node.served() == {B}


def test_the_folder_of_a_process_that_lives_stays(node, left):
    ring = node.ring(A)
    left(60.0, ONE)
    left(700.0, ONE)
    assert ring.path.exists()
    ring.die()
    assert left(760.0, ONE) == {B}


def test_an_inbox_whose_folder_did_not_survive_a_reboot_goes_too(node, left):
    node.pod(A).rename(node.folder.path / "lost")
    left(60.0, ONE)
    assert left(660.0, ONE) == {B}


def test_what_there_was_no_time_for_goes_in_the_next_round(node, left, known_pods, monkeypatch):
    monkeypatch.setattr(inbox, "REMOVE_S", -1.0)
    left(60.0, ONE)
    leaving = left(660.0, ONE) - {B}
    assert A not in leaving
    assert len(leaving) == 2
    monkeypatch.setattr(inbox, "REMOVE_S", 2.0)
    # Also of a daemon that was started since.
    successor = GonePods(node.folder, known_pods, frozenset, node.clock.monotonic)
    assert left(0.0, ONE, successor) == {B}
