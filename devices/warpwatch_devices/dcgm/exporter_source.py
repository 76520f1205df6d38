"""Reads a running dcgm-exporter and maps its page to our devices and series.

dcgm-exporter reads DCGM every 30 s by default, and still serves its last values if DCGM is gone. So
a page that equals the one before is not published, and the devices become stale.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from base64 import b64encode
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import unquote, urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from warpwatch_devices.config import DcgmExporterConfig
from warpwatch_devices.dcgm.values import (
    INSTANCE_ROWS,
    ROWS,
    PublishedDevices,
    device_of,
    in_our_unit,
)
from warpwatch_devices.source import Sink, Source, SourceContext
from warpwatch_runtime.http_requests import RequestError, Requests
from warpwatch_runtime.supervisor import LoopRunner
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import Device, DeviceSample, SourceHealth

logger = logging.getLogger(__name__)

MAX_DEVICES = 1024
# A line of dcgm-exporter has a few hundred characters; with many pod labels a few thousand.
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


def read(text: str) -> tuple[list[ScrapedDevice], int]:
    """Return the devices, and the number of lines and values that cannot be."""
    devices: dict[tuple[str, str], ScrapedDevice] = {}
    rejected = sum(sample is None or not _is_added(devices, sample) for sample in parse(text, ROWS))
    return list(devices.values()), rejected


def parse(text: str, names: Container[str]) -> Iterator[Sample | None]:
    """Yield the samples with these names, and None for each of their broken lines.

    Lines are parsed one by one, because the parser stops at the first broken one.
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


def _is_added(devices: dict[tuple[str, str], ScrapedDevice], sample: Sample) -> bool:
    """Add a sample; return False for an invalid one and beyond MAX_DEVICES."""
    if "vgpu" in sample.labels and sample.name in _OF_A_POD:
        return True
    row = ROWS[sample.name]
    device = _device(sample.labels, sample.name in INSTANCE_ROWS)
    value = in_our_unit(row, sample.value)
    if device is None or value is None:
        return False
    place = (device.uuid, device.gpu_instance)
    if place not in devices and len(devices) >= MAX_DEVICES:
        return False
    # Copies for several jobs or pods say the same again.
    devices.setdefault(place, ScrapedDevice(device)).values.setdefault(row.series[0], value)
    return True


def _device(labels: Mapping[str, str], of_instance: bool) -> Device | None:
    """Return the device that the labels name, or None.

    On a GPU in MIG mode only instances are served; values that are not theirs are the GPU's.
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
    """Return a label's text; DCGM writes ``<<<NULL>>>`` for an unknown one."""
    text = labels.get(name, "")
    return "" if text.startswith("<<<") else text[:_MAX_TEXT_CHARACTERS]


INTERVAL_S = 10.0
TIMEOUT_S = 5.0
MAX_BODY_BYTES = 16 * 2**20

_MAX_REASON_CHARACTERS = 200


class ScrapeFailed(Exception):
    """The exporter's answer cannot be used; the text says why in one line."""


class DcgmExporterSource(Source):
    """The page of this node's dcgm-exporter."""

    name = "dcgm_exporter"

    def __init__(
        self,
        config: DcgmExporterConfig,
        context: SourceContext,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._url = config.url or ""
        self._context = context
        self._published = PublishedDevices(self.name)
        self._last_digest = b""
        self._errors = 0
        self._reason = ""

    def start(self, supervisor: LoopRunner, sink: Sink) -> None:
        supervisor.every(self.name, INTERVAL_S, lambda: self._read(sink))

    def _read(self, sink: Sink) -> None:
        begun = self._monotonic()
        reason = ""
        try:
            self._scrape(sink)
        except ScrapeFailed as failure:
            self._errors += 1
            reason = f"dcgm-exporter at {_server(self._url)}: {failure}"
        if reason and reason != self._reason:
            logger.warning("%s", reason)
        self._reason = reason
        duration_s = self._monotonic() - begun
        sink.publish_health(SourceHealth(self.name, not reason, reason, duration_s, self._errors))

    def _scrape(self, sink: Sink) -> None:
        now = self._wall()
        body = fetch(self._url)
        digest = hashlib.blake2b(body).digest()
        if digest == self._last_digest:
            return
        devices, rejected = read(body.decode("utf-8", "replace"))
        self._errors += rejected
        if not devices:
            raise ScrapeFailed("it answers, but without values of a GPU; is the address right?")
        self._published.publish(self._samples(devices, now), sink)
        self._last_digest = digest

    def _samples(self, devices: list[ScrapedDevice], now: float) -> list[DeviceSample]:
        known = self._context.devices()
        return [
            DeviceSample(device, now, scraped.values, source=self.name)
            for scraped in devices
            if (device := device_of(scraped.device, known)) is not None
        ]


def fetch(url: str) -> bytes:
    """Return the body, at most MAX_BODY_BYTES. Raises ScrapeFailed."""
    parts, headers = urlsplit(url), {"Accept": "text/plain"}
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {b64encode(user.encode()).decode()}"
    requests = Requests(timeout_s=TIMEOUT_S, max_answer_bytes=MAX_BODY_BYTES + 1)
    try:
        answer = requests.send("GET", url, headers=headers)
    except RequestError as error:
        raise ScrapeFailed(_explain(error)) from error
    if answer.status != HTTPStatus.OK:
        raise ScrapeFailed(f"it answers {answer.status}")
    if len(answer.content) > MAX_BODY_BYTES:
        raise ScrapeFailed(f"its answer is longer than {MAX_BODY_BYTES} bytes")
    return answer.content


def _explain(error: RequestError) -> str:
    if isinstance(error.__cause__, TimeoutError):
        return f"no answer within {TIMEOUT_S:g} s"
    if isinstance(error.__cause__, ConnectionRefusedError):
        return "nothing listens there; is dcgm-exporter running?"
    return " ".join(str(error).split())[:_MAX_REASON_CHARACTERS]


def _server(url: str) -> str:
    """Return host and port without credentials, for messages."""
    return urlsplit(url).netloc.rpartition("@")[2]
