"""The containers that hold devices, from the kubelet of the node."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from warpwatch_devices.attribution.device_ids import KnownDevices, allocations_of
from warpwatch_devices.attribution.origin import OriginAnswer, OriginError
from warpwatch_telemetry.samples import Attribution, DeviceSample, Workload

if TYPE_CHECKING:
    from warpwatch_devices.attribution.podresources_client import PodResourcesClient

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
            # Here and not above: this imports gRPC.
            from warpwatch_devices.attribution.podresources_client import PodResourcesClient

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
