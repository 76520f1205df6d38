"""Fuzzes the answers of a server on the kubelet's socket: any bytes, and any message."""

import socket
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from tests.devices.attribution import fake_kubelet
from tests.devices.attribution.gpus import GPU_0, GPU_1, MIG_3, node
from tests.fuzz.watch import Target
from warpwatch_devices.attribution import podresources_pb2 as messages
from warpwatch_devices.attribution.kubelet import (
    MAX_HOLDERS,
    MAX_REFUSED,
    KubeletOrigin,
    PodResourcesClient,
)
from warpwatch_devices.source import OriginError


class AnsweredClient(PodResourcesClient):
    """A client that gets ``answer`` to every request."""

    answer: Any = None

    def _method(self) -> Any:
        return lambda request, timeout: self.answer


def target(folder: Path) -> Target:
    path = folder / "kubelet.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    client = AnsweredClient(path)
    origin = KubeletOrigin(path)
    origin._client = client

    def run(data: bytes) -> None:
        try:
            client.answer = messages.ListPodResourcesResponse.FromString(data)
        except DecodeError:
            # gRPC makes an RpcError of it.
            return
        try:
            answer = origin.read(node(7), 1000.0)
        except OriginError:
            return
        assert len(answer.refused) <= MAX_REFUSED
        for attribution in answer.attributions:
            for workloads in attribution.workloads.values():
                assert 0 < len(workloads) <= MAX_HOLDERS
                assert all(workload.pod.isprintable() for workload in workloads)

    gpu = "nvidia.com/gpu"
    plugged = fake_kubelet.pods(("a", gpu, GPU_0), ("b", f"{gpu}.shared", f"{GPU_1}::3"))
    named = fake_kubelet.pods(("c", "nvidia.com/mig-3g.40gb", MIG_3), ("d", gpu, "nvidia0/gi3"))
    claimed = messages.ListPodResourcesResponse()
    resource = fake_kubelet.add_pod(claimed, "e").dynamic_resources.add(claim_name="c")
    for name in ("gpu-1", "gpu-1-mig-3g-40gb-3-0"):
        claim = resource.claim_resources.add(driver_name="gpu.nvidia.com", device_name=name)
        claim.cdi_devices.add(name=f"k8s.gpu.nvidia.com/claim={name}")
    seeds = [answer.SerializeToString() for answer in (plugged, named, claimed)]
    tokens = (GPU_0.encode(), MIG_3.encode(), b"nvidia0/gi3", b"gpu.nvidia.com", b"\xff" * 9)
    return Target(run, seeds, tokens, 2048)
