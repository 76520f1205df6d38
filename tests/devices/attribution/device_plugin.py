"""A device plugin that offers GPUs that do not exist to a real kubelet."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

_PROTO = Path(__file__).with_name("device_plugin.proto")
_FOLDER = Path("/var/lib/kubelet/device-plugins")
_ENDPOINT = "warpwatch-test.sock"


def messages(folder: Path) -> Any:
    """The module made of device_plugin.proto, generated in ``folder``."""
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(_PROTO.parent)]
    subprocess.run([*command, f"--python_out={folder}", str(_PROTO)], check=True)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("device_plugin_pb2")
    finally:
        sys.path.remove(str(folder))


class DevicePlugin:
    def __init__(self, folder: Path, resource: str, ids: Sequence[str]) -> None:
        self._pb = messages(folder)
        self._resource = resource
        self._ids = ids
        self._ended = threading.Event()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((self._handlers(),))

    def start(self) -> None:
        """Serves and registers; raises grpc.RpcError while the kubelet is not ready for it."""
        (_FOLDER / _ENDPOINT).unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix:{_FOLDER / _ENDPOINT}")
        self._server.start()
        request = self._pb.RegisterRequest(
            version="v1beta1", endpoint=_ENDPOINT, resource_name=self._resource
        )
        options = [("grpc.default_authority", "localhost")]
        with grpc.insecure_channel(f"unix:{_FOLDER / 'kubelet.sock'}", options) as channel:
            register = channel.unary_unary(
                "/v1beta1.Registration/Register",
                request_serializer=self._pb.RegisterRequest.SerializeToString,
                response_deserializer=self._pb.Empty.FromString,
            )
            register(request, timeout=300, wait_for_ready=True)

    def stop(self) -> None:
        self._ended.set()
        self._server.stop(0).wait()

    def _handlers(self) -> Any:
        pb = self._pb
        methods = {
            "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(
                lambda request, context: pb.DevicePluginOptions(),
                pb.Empty.FromString,
                pb.DevicePluginOptions.SerializeToString,
            ),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list, pb.Empty.FromString, pb.ListAndWatchResponse.SerializeToString
            ),
            "Allocate": grpc.unary_unary_rpc_method_handler(
                self._allocate, pb.AllocateRequest.FromString, pb.AllocateResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", methods)

    def _list(self, request: Any, context: Any) -> Iterator[Any]:
        devices = [self._pb.Device(ID=text, health="Healthy") for text in self._ids]
        yield self._pb.ListAndWatchResponse(devices=devices)
        while context.is_active() and not self._ended.wait(1):
            pass

    def _allocate(self, request: Any, context: Any) -> Any:
        responses = [
            self._pb.ContainerAllocateResponse(
                envs={"NVIDIA_VISIBLE_DEVICES": ",".join(container.devices_ids)}
            )
            for container in request.container_requests
        ]
        return self._pb.AllocateResponse(container_responses=responses)
