"""Whose values they are: the GPUs and GPU instances of DCGM, found among the devices of NVML."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from warpwatch_devices.source import Sink
from warpwatch_telemetry.samples import Device, DeviceSample

_DCGM_SOURCES = frozenset({"dcgm", "dcgm_exporter"})


def device_of(listed: Device, known: Iterable[DeviceSample]) -> Device | None:
    """The device that ``listed`` is, whose UUID is the GPU's even where it is a GPU instance.

    DCGM does not give the UUID of a MIG device: NVML's with the same GPU and GPU instance is
    taken, of several (compute instances) the first. An instance of a GPU that NVML does not know
    gets the key ``<uuid>/gi<id>``; one that NVML does not know of a GPU that it does, None.
    """
    devices = [sample.device for sample in known if sample.source not in _DCGM_SOURCES]
    gpu = next((device for device in devices if device.uuid == listed.uuid), None)
    if not listed.gpu_instance:
        return gpu or listed
    if gpu is None:
        return replace(listed, uuid=f"{listed.uuid}/gi{listed.gpu_instance}")
    instances = (d for d in devices if d.info.get("parent_uuid") == gpu.uuid)
    return next((d for d in instances if d.gpu_instance == listed.gpu_instance), None)


class PublishedDevices:
    """What a source has published, so that devices that it does not see any more are forgotten."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._uuids: frozenset[str] = frozenset()

    def publish(self, samples: Iterable[DeviceSample], sink: Sink) -> None:
        """Everything that the source knows now."""
        uuids = set()
        for sample in samples:
            uuids.add(sample.device.uuid)
            sink.publish_device(sample)
        for uuid in self._uuids - uuids:
            sink.forget_device(uuid, self._source)
        self._uuids = frozenset(uuids)
