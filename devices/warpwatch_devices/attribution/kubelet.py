"""Queries the kubelet of the node over gRPC for the containers that hold devices."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from warpwatch_devices.attribution.device_ids import KnownDevices, ListedDevice, allocations_of
from warpwatch_devices.source import OriginAnswer, OriginError
from warpwatch_telemetry.samples import Attribution, DeviceSample, Workload

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
        # Here and not above, so that a node without a kubelet does not load gRPC.
        import grpc

        from warpwatch_devices.attribution import podresources_pb2

        self._grpc: Any = grpc
        self._messages: Any = podresources_pb2
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
        request = self._messages.ListPodResourcesRequest()
        try:
            response = self._method()(request, timeout=DEADLINE_S)
        except (self._grpc.RpcError, OSError) as error:
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
            self._channel = self._grpc.insecure_channel(f"unix:{self._socket}", options=_OPTIONS)
        return self._channel.unary_unary(
            _METHOD,
            request_serializer=self._messages.ListPodResourcesRequest.SerializeToString,
            response_deserializer=self._messages.ListPodResourcesResponse.FromString,
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


DEFAULT_SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
# Nothing real comes near these; they keep an absurd answer from becoming absurd series.
MAX_HOLDERS = 256
MAX_REFUSED = 1000


class KubeletOrigin:
    """The containers that hold devices; with ``optional`` a node may lack the socket."""

    name = "kubelet"
    needs_devices = True

    def __init__(
        self,
        socket: Path = DEFAULT_SOCKET,
        *,
        optional: bool = True,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._socket = socket
        self._optional = optional
        self._client: PodResourcesClient | None = None
        self._holders = Holders()

    def read(self, samples: Iterable[DeviceSample], now: float) -> OriginAnswer:
        if not self._is_there():
            return OriginAnswer()
        if self._client is None:
            self._client = PodResourcesClient(self._socket, self._monotonic)
        allocations, refused = allocations_of(self._client.list())
        devices = KnownDevices(samples)
        held: dict[str, dict[Workload, bool]] = {}
        for allocation in allocations:
            uuid = devices.resolve(allocation.device)
            if uuid is None:
                refused.add(allocation.device_id)
                continue
            shared = held.setdefault(uuid, {})
            shared[allocation.workload] = allocation.device.shared
        workloads = self._holders.follow(held)
        attribution = Attribution(self.name, now, workloads=workloads)
        return OriginAnswer((attribution,), frozenset(islice(refused, MAX_REFUSED)))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _is_there(self) -> bool:
        """Return whether the socket exists. Raises OriginError if it has disappeared."""
        try:
            if stat.S_ISSOCK(self._socket.stat().st_mode):
                return True
            raise OriginError(f"{self._socket} is not a socket")
        except OSError as error:
            absent = isinstance(error, FileNotFoundError | NotADirectoryError)
            if absent and self._optional and self._client is None:
                return False
            raise OriginError(f"{self._socket}: {error.strerror}") from error


class Holders:
    """The holders of each device, without pods that have ended.

    Kubelets before 1.34 also list ended pods. If several pods seem to hold a whole device, the
    newest one does: the others have ended. Pods first seen together, and those of a shared device,
    are all kept.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, str, str], int] = {}
        self._round = 0

    def follow(self, held: dict[str, dict[Workload, bool]]) -> dict[str, tuple[Workload, ...]]:
        """Return the live holders; ``held`` says by UUID and workload if the device is shared."""
        self._round += 1
        self._since = {
            key: self._since.get(key, self._round)
            for uuid, workloads in held.items()
            for key in (_claim(uuid, workload) for workload in workloads)
        }
        return {uuid: self._living(uuid, workloads) for uuid, workloads in held.items()}

    def _living(self, uuid: str, workloads: dict[Workload, bool]) -> tuple[Workload, ...]:
        if any(workloads.values()):
            return tuple(sorted(workloads))[:MAX_HOLDERS]
        newest = max(self._since[_claim(uuid, workload)] for workload in workloads)
        living = (w for w in workloads if self._since[_claim(uuid, w)] == newest)
        return tuple(sorted(living))[:MAX_HOLDERS]


def _claim(uuid: str, workload: Workload) -> tuple[str, str, str]:
    return uuid, workload.namespace, workload.pod
