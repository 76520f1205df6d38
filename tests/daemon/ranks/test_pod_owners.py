"""Whose a ring is: the namespace of its pod as the kubelet has it, else the user of its file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.ranks.pod_node import A, B, PodNode
from tests.daemon.ranks.ring_files import RingFile
from warpwatch_daemon.state.hub import Hub
from warpwatch_telemetry.attribution import Attribution, Pod

OWN = f"uid/{os.getuid()}"


class Kubelet:
    """pods: those that it has; None: it is not readable."""

    def __init__(self) -> None:
        self.pods: dict[str, Pod] | None = {B: Pod("others", "train-1")}

    def __call__(self) -> dict[str, Pod] | None:
        return self.pods


@pytest.fixture
def kubelet() -> Kubelet:
    return Kubelet()


@pytest.fixture
def node(tmp_path: Path, kubelet: Kubelet) -> Iterator[PodNode]:
    node = PodNode(tmp_path, known_pods=kubelet)
    yield node
    node.close()


def owners(node: PodNode) -> dict[str, str]:
    """Of the rings of live ranks, by job."""
    found = {}
    for job in node.source.jobs():
        (rank,) = node.source.targets(job).values()
        assert rank.ring is not None
        found[job.name] = rank.ring.owner
    return found


def test_a_job_belongs_to_the_namespace_of_its_pod_whatever_it_claims(node: PodNode) -> None:
    node.mount(B)
    pod = RingFile(node.pod(B) / "ranks", job="in-a-pod", pod_uid=A, owner="ns/kube-system")
    shared = RingFile(node.folder.ranks, job="shared", pod_uid=B)
    with pod.held(), shared.held():
        node.poll()
        assert owners(node) == {"in-a-pod": "ns/others", "shared": OWN}


def test_a_ring_waits_for_the_kubelet_to_know_its_pod(node: PodNode, kubelet: Kubelet) -> None:
    node.mount(A)
    with RingFile(node.pod(A) / "ranks", job="early").held():
        node.poll(14)
        assert owners(node) == {}
        kubelet.pods = {A: Pod("team", "train-0")}
        node.poll(14.5)
        assert owners(node) == {"early": "ns/team"}
        # What it was once, it stays.
        kubelet.pods = {}
        node.poll(40)
        assert owners(node) == {"early": "ns/team"}
    assert dict(node.rejects) == {}


@pytest.mark.parametrize("readable", [True, False])
def test_a_ring_whose_pod_stays_unknown_belongs_to_its_user(
    node: PodNode, kubelet: Kubelet, readable: bool
) -> None:
    kubelet.pods = {} if readable else None
    node.mount(A)
    with RingFile(node.pod(A) / "ranks", job="stray").held():
        node.poll(16)
        assert owners(node) == {"stray": OWN}
        node.poll(40)
    assert dict(node.rejects) == {"unknown_pod": 1}


def test_without_a_kubelet_no_ring_waits(tmp_path: Path) -> None:
    node = PodNode(tmp_path)
    node.mount(A)
    with RingFile(node.pod(A) / "ranks", job="bare").held():
        node.poll()
        assert owners(node) == {"bare": OWN}
    node.close()


def test_counts_saved_before_a_restart_wait_with_the_ring(node: PodNode, kubelet: Kubelet) -> None:
    kubelet.pods = {A: Pod("team", "train-0")}
    node.mount(A)
    ring = RingFile(node.pod(A) / "ranks", job="again")
    with ring.held():
        ring.step()
        node.poll()
        node.source.close()
        kubelet.pods = None
        node.source = node.start()
        node.poll(2)
        node.poll(4)
        kubelet.pods = {A: Pod("team", "train-0")}
        node.poll(6)
        assert [state.steps_total for state in node.states()] == [1]
        assert owners(node) == {"again": "ns/team"}


def test_what_the_kubelet_had_is_believed_for_fifteen_seconds() -> None:
    now = [100.0]
    hub = Hub(4.0, monotonic=lambda: now[0])
    assert hub.pods() is None
    hub.publish_attribution(Attribution("kubelet", time.time()))
    hub.publish_attribution(Attribution("pod_logs", time.time(), pods={A: Pod("team", "train")}))
    hub.publish_attribution(Attribution("slurm", time.time()))
    now[0] += 15.0
    assert hub.pods() == {A: Pod("team", "train")}
    now[0] += 0.1
    assert hub.pods() is None
