"""Asks the kubelet which containers hold which devices.

gRPC adds about 15 MiB to the process, so this module is imported only where there is a kubelet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import grpc

from warpwatch_devices.attribution import podresources_pb2
from warpwatch_devices.attribution.device_ids import ListedDevice
from warpwatch_devices.attribution.origin import OriginError
from warpwatch_telemetry.samples import Workload

DEADLINE_S = 10.0
# A kubelet answers before it has its pods from the API server, which then mostly takes it a moment.
STARTING_S = 60.0
# The limit of the kubelet itself for this call.
MAX_ANSWER_BYTES = 16 * 2**20
# A node has some hundred pods; an answer with more devices than this is not read to its end.
MAX_LISTED = 65_536
# A device of a claim has a name for itself and one for the claim.
_MAX_CDI_NAMES = 8

_METHOD = "/v1.PodResourcesLister/List"
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    # By default gRPC would send the socket's path as the host, which is not a valid name.
    ("grpc.default_authority", "localhost"),
    # The failures of an old channel must not delay the first attempt of a new one.
    ("grpc.use_local_subchannel_pool", 1),
)


class PodResourcesClient:
    """One connection to the kubelet's socket, kept until a failure or ``close``."""

    def __init__(self, socket: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._socket = socket
        self._channel: Any = None
        self._file: tuple[int, int, int] | None = None
        self._had_devices = False
        self._doubted_until = 0.0

    def list(self) -> list[ListedDevice]:
        """Return the listed devices. Raises OriginError without a reply in DEADLINE_S.

        It is also raised for STARTING_S after a restart of the kubelet that lists no devices: a
        kubelet lists no pods at first, although they run on.
        """
        request = podresources_pb2.ListPodResourcesRequest()
        try:
            response = self._method()(request, timeout=DEADLINE_S)
        except (grpc.RpcError, OSError) as error:
            self.close()
            raise OriginError(_reason(error)) from error
        listed = list(islice(_flat(response), MAX_LISTED + 1))
        if len(listed) > MAX_LISTED:
            raise OriginError(f"more than {MAX_LISTED} devices are listed")
        if not listed and self._monotonic() < self._doubted_until:
            raise OriginError("no devices are listed yet by a kubelet that was started again")
        self._doubted_until = 0.0
        self._had_devices = bool(listed)
        return listed

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _method(self) -> Any:
        status = self._socket.stat()
        # With the time of its making: a new file may get the number of one that was removed.
        file = (status.st_dev, status.st_ino, status.st_ctime_ns)
        if file != self._file:
            # A kubelet that was started again has another socket under the same name.
            self.close()
        if self._channel is None:
            self._file = file
            self._doubted_until = self._monotonic() + STARTING_S if self._had_devices else 0.0
            self._channel = grpc.insecure_channel(f"unix:{self._socket}", options=_OPTIONS)
        return self._channel.unary_unary(
            _METHOD,
            request_serializer=podresources_pb2.ListPodResourcesRequest.SerializeToString,
            response_deserializer=podresources_pb2.ListPodResourcesResponse.FromString,
        )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    status = code().name if code is not None else type(error).__name__
    return f"{status}: {' '.join(str(details()).split())}"[:400] if details else status


def _flat(response: Any) -> Iterator[ListedDevice]:
    for pod in response.pod_resources:
        for container in pod.containers:
            workload = Workload(pod.namespace, pod.name, container.name)
            for devices in container.devices:
                for device_id in devices.device_ids:
                    yield ListedDevice(workload, devices.resource_name, device_id)
            for resource in container.dynamic_resources:
                for claimed in resource.claim_resources:
                    names = tuple(cdi.name for cdi in claimed.cdi_devices[:_MAX_CDI_NAMES])
                    yield ListedDevice(
                        workload, claimed.driver_name, claimed.device_name, names, claimed=True
                    )
