"""Whose a ring is: the namespace of its pod as the kubelet has it, else the user of its file."""

from __future__ import annotations

import os

import pytest

from tests.daemon.ranks.sources import A, B, RankNode
from tests.manual_clock import ManualClock
from warpwatch_daemon.state.hub import Hub
from warpwatch_telemetry.attribution import Attribution, Pod
from warpwatch_telemetry.records import RankSeen

OWN = f"uid/{os.getuid()}"
TEAM = {A: Pod("team", "train-0")}


class Kubelet:
    """pods: those that it has; None: it is not readable."""

    def __init__(self) -> None:
        self.pods: dict[str, Pod] | None = {B: Pod("others", "train-1")}

    def __call__(self) -> dict[str, Pod] | None:
        return self.pods


@pytest.fixture
def known_pods():
    return Kubelet()


def owners(node: RankNode) -> dict[str, str]:
    """Of the rings of live ranks, by job."""
    return {rank.job.name: rank.ring.owner for rank in node.source.live() if rank.ring}


def test_a_job_belongs_to_the_namespace_of_its_pod_whatever_it_claims(node):
    node.mount(B)
    node.ring(B, job="in-a-pod", pod_uid=A, owner="ns/kube-system")
    node.ring(job="shared", pod_uid=B)
    seen = {one.job: (one.pod, one.pod_uid) for one in node.poll() if isinstance(one, RankSeen)}
    assert owners(node) == {"in-a-pod": "ns/others", "shared": OWN}
    assert seen == {"in-a-pod": ("train-1", B), "shared": ("", "")}


def test_a_ring_waits_for_the_kubelet_to_know_its_pod(node, known_pods):
    node.mount(A)
    node.ring(A, job="early")
    node.poll(14)
    assert owners(node) == {}
    known_pods.pods = TEAM
    node.poll(14.5)
    assert owners(node) == {"early": "ns/team"}
    # What it was once, it stays.
    known_pods.pods = {}
    node.poll(40)
    assert owners(node) == {"early": "ns/team"}
    assert node.rejects == {}


@pytest.mark.parametrize("pods", [{}, None])
def test_a_ring_whose_pod_stays_unknown_belongs_to_its_user(node, known_pods, pods):
    known_pods.pods = pods
    node.mount(A)
    node.ring(A, job="stray")
    for at_s in (16, 40):
        node.poll(at_s)
        assert owners(node) == {"stray": OWN}
    assert node.rejects == {"unknown_pod": 1}


def test_counts_saved_before_a_restart_wait_with_the_ring(node, known_pods):
    known_pods.pods = TEAM
    node.mount(A)
    node.ring(A, job="again").step()
    node.poll()
    known_pods.pods = None
    node.restart()
    node.poll(2)
    node.poll(4)
    known_pods.pods = TEAM
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
