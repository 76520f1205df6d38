"""What one scrape of dcgm-exporter says about this host's devices."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from warpwatch_devices.dcgm.values import INSTANCE_ROWS, ROWS, in_our_unit
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import Device

MAX_DEVICES = 1024
# dcgm-exporter's lines have some hundred characters; with many pod labels some thousand.
MAX_LINE_CHARACTERS = 16_384

_NAME = re.compile(r"DCGM_\w+", re.ASCII)
_UUID = re.compile(r"[!-~]{1,96}")
_NUMBER = re.compile(r"\d{1,4}", re.ASCII)
_MAX_TEXT_CHARACTERS = 128
# With virtual GPUs these are a pod's own beside the device's; the rest are copies of the device's.
_OF_A_POD = frozenset({"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"})
# dcgm-exporter's label of what describes a device, by our name for it.
_INFO = {"pci_bus_id": "pci_bus_id", "driver_version": "DCGM_FI_DRIVER_VERSION"}


@dataclass(frozen=True, slots=True)
class ScrapedDevice:
    """values: in our units. A GPU instance has the UUID of its GPU here."""

    device: Device
    values: dict[SeriesKey, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scrape:
    """rejected: lines and values that cannot be. hosts: all that it speaks of."""

    devices: list[ScrapedDevice]
    rejected: int
    hosts: tuple[str, ...]


def read(text: str, hostname: str) -> Scrape:
    """The devices of ``hostname``; where it names one host or none, all."""
    gathering = _DeviceParts()
    for sample in parse(text, ROWS):
        if sample is None or not gathering.add(sample):
            gathering.rejected += 1
    hosts = tuple(sorted(host for host in gathering.hosts if host))
    devices: dict[tuple[str, str], ScrapedDevice] = {}
    for host, of_host in gathering.hosts.items():
        if len(hosts) > 1 and not _same_host(host, hostname):
            continue
        for place, scraped in of_host.items():
            values = devices.setdefault(place, ScrapedDevice(scraped.device)).values
            values |= scraped.values
    return Scrape(list(devices.values()), gathering.rejected, hosts)


def parse(text: str, names: Container[str]) -> Iterator[Sample | None]:
    """The samples whose name is one of ``names``; None for each of their lines that is broken.

    Line by line, because the parser gives up at the first broken one.
    """
    for line in text.split("\n"):
        name = _NAME.match(line)
        if name and name[0] in names:
            yield _sample(line, name[0])


def _sample(line: str, name: str) -> Sample | None:
    if len(line) > MAX_LINE_CHARACTERS:
        return None
    try:
        (family,) = text_string_to_metric_families(line)
        (sample,) = family.samples
        # The parser takes all for the name that is before a brace or space.
        return sample._replace(value=float(sample.value)) if sample.name == name else None
    except (ValueError, IndexError, OverflowError):
        return None


class _DeviceParts:
    """What was read so far, by host and by the UUID and instance of the device."""

    def __init__(self) -> None:
        self.hosts: dict[str, dict[tuple[str, str], ScrapedDevice]] = {}
        self.rejected = 0
        self._devices = 0

    def add(self, sample: Sample) -> bool:
        """False for what cannot be, and for devices beyond MAX_DEVICES."""
        if "vgpu" in sample.labels and sample.name in _OF_A_POD:
            return True
        row = ROWS[sample.name]
        device = _device(sample.labels, sample.name in INSTANCE_ROWS)
        value = in_our_unit(row, sample.value)
        if device is None or value is None:
            return False
        scraped = self._scraped(_host(sample.labels), device)
        if scraped is None:
            return False
        # Copies for several jobs or pods say the same again.
        scraped.values.setdefault(row.series[0], value)
        return True

    def _scraped(self, host: str, device: Device) -> ScrapedDevice | None:
        place = (device.uuid, device.gpu_instance)
        scraped = self.hosts.get(host, {}).get(place)
        if scraped is None and self._devices < MAX_DEVICES:
            self._devices += 1
            scraped = ScrapedDevice(device)
            self.hosts.setdefault(host, {})[place] = scraped
        return scraped


def _device(labels: Mapping[str, str], of_instance: bool) -> Device | None:
    """None where the labels do not say which device it is.

    Of a GPU in MIG mode only the instances are served; what is not theirs is the GPU's.
    """
    uuid = labels.get("UUID") or labels.get("uuid", "")
    index = labels.get("gpu") or labels.get("device", "").removeprefix("nvidia")
    instance = labels.get("GPU_I_ID", "")
    if not _UUID.fullmatch(uuid) or not _NUMBER.fullmatch(index):
        return None
    if instance and not _NUMBER.fullmatch(instance):
        return None
    instance = instance if of_instance else ""
    return Device(
        uuid,
        int(index),
        _text(labels, "modelName"),
        gpu_instance=instance,
        profile=_text(labels, "GPU_I_PROFILE") if instance else "",
        info={own: text for own, theirs in _INFO.items() if (text := _text(labels, theirs))},
    )


def _text(labels: Mapping[str, str], name: str) -> str:
    """A label that describes; DCGM writes what it does not know as ``<<<NULL>>>``."""
    text = labels.get(name, "")
    return "" if text.startswith("<<<") else text[:_MAX_TEXT_CHARACTERS]


def _host(labels: Mapping[str, str]) -> str:
    """``Hostname`` up to release 4.5.3-4.8.2, ``hostname`` after it."""
    return _text(labels, "Hostname") or _text(labels, "hostname")


def _same_host(theirs: str, ours: str) -> bool:
    """A host's name with and without its domain is the same."""
    if "." in theirs and "." in ours:
        return theirs == ours
    return theirs.partition(".")[0] == ours.partition(".")[0]
