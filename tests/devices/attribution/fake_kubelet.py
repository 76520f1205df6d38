"""A kubelet as far as its pod-resources API goes: a gRPC server on a unix socket."""

import threading
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from tests.waiting import DEADLINE_S
from warpwatch_devices.attribution import podresources_pb2 as pb


class FakeKubelet:
    """``response``, or an error with this text, is answered while ``answering`` is set."""

    def __init__(self, socket: Path, response: Any = None) -> None:
        self.response = response if response is not None else pb.ListPodResourcesResponse()
        self.answering = threading.Event()
        self.answering.set()
        self.calls = 0
        self.peers: set[str] = set()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(2), options=[("grpc.max_send_message_length", -1)]
        )
        handler = grpc.unary_unary_rpc_method_handler(
            self._list,
            request_deserializer=pb.ListPodResourcesRequest.FromString,
            response_serializer=pb.ListPodResourcesResponse.SerializeToString,
        )
        service = grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": handler})
        self._server.add_generic_rpc_handlers((service,))
        self._server.add_insecure_port(f"unix:{socket}")
        self._server.start()

    def stop(self) -> None:
        self.answering.set()
        self._server.stop(0).wait()

    def _list(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls += 1
        self.peers.add(context.peer())
        self.answering.wait(DEADLINE_S)
        if isinstance(self.response, str):
            context.abort(grpc.StatusCode.INTERNAL, self.response)
        return self.response


def add_pod(response: Any, name: str, namespace: str = "default", container: str = "main") -> Any:
    pod = response.pod_resources.add(name=name, namespace=namespace)
    return pod.containers.add(name=container)


def pods(*held: tuple[str, str, str]) -> Any:
    response = pb.ListPodResourcesResponse()
    for name, resource, device_id in held:
        container = add_pod(response, name)
        container.devices.add(resource_name=resource, device_ids=[device_id])
    return response
