"""One device read through NVML: its handle, its readers, and what their errors mean for it."""

from __future__ import annotations

import logging
import time
from typing import Any

import pynvml

from warpwatch.daemon.sources.base import Sink
from warpwatch.daemon.sources.nvml_library import Meaning, code_of, meaning_of
from warpwatch.daemon.sources.nvml_readers import (
    Reader,
    Values,
    device_readers,
    read_facts,
    read_processes,
)
from warpwatch.telemetry.samples import Device, DeviceProcess, DeviceSample

logger = logging.getLogger(__name__)

# How long a device that is gone is left alone before it is looked for again.
PROBE_INTERVAL_S = 10.0

_GONE = {
    Meaning.LOST: "lost",
    Meaning.RESET_REQUIRED: "reset_required",
    Meaning.NO_PERMISSION: "no_permission",
}


class DeviceGone(Exception):
    """The device cannot be read; the text is the reason that is published."""


class LibraryGone(Exception):
    """NVML itself must be initialised again."""


class NvmlDevice:
    """The device at ``index``. Only its own loop calls ``step``; the watchdog reads ``device``."""

    def __init__(
        self, index: int, sink: Sink, interval_s: float, probe_interval_s: float = PROBE_INTERVAL_S
    ) -> None:
        # Until the device has told its UUID there is nothing better to call it.
        self.device = Device(uuid=f"unknown-{index}", index=index, name="")
        self.errors = 0
        self.library_gone = False
        self._index = index
        self._sink = sink
        self._interval_s = interval_s
        self._probe_interval_s = probe_interval_s
        self._reason = ""
        self._probe_at = 0.0
        self._handle: Any = None
        self._readers: list[Reader] = []
        self._slow: dict[str, Values] = {}
        self._round = 0
        self._busy_s = 0.0
        self._read_at: float | None = None

    def step(self) -> None:
        """Read the device once and publish what came of it."""
        if self.library_gone:
            return
        if self._reason and time.monotonic() < self._probe_at:
            self._publish_down()
            return
        try:
            if self._handle is None:
                self._open()
            self._sink.publish_device(self._read())
            self._reason = ""
        except LibraryGone:
            self.library_gone = True
            self._reason = "driver"
            self._publish_down()
        except DeviceGone as gone:
            self._give_up(str(gone))

    def publish_stuck(self) -> None:
        """Called by the watchdog, while ``step`` does not come back."""
        self._sink.publish_device(DeviceSample(self.device, time.time(), up=False, reason="stuck"))

    def _publish_down(self) -> None:
        sample = DeviceSample(self.device, time.time(), up=False, reason=self._reason)
        self._sink.publish_device(sample)

    def _give_up(self, reason: str) -> None:
        if reason != self._reason:
            logger.warning("device %s (%s): %s", self._index, self.device.uuid, reason)
        self._reason = reason
        self._probe_at = time.monotonic() + self._probe_interval_s
        self._handle = None
        self._publish_down()

    def _open(self) -> None:
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(self._index)
            uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
            facts = read_facts(handle)
        except pynvml.NVMLError as error:
            raise DeviceGone(_GONE.get(self._judge(error), "driver")) from error
        if uuid != self.device.uuid:
            self._sink.forget_device(self.device.uuid)
        self.device = Device(uuid=uuid, index=self._index, name=name, info=facts)
        self._handle = handle
        self._readers = device_readers()
        self._slow = {}
        self._round = 0
        self._read_at = None

    def _judge(self, error: pynvml.NVMLError) -> Meaning:
        """What an error says of one value; raises when it says something of the whole device."""
        meaning = meaning_of(code_of(error))
        if meaning is Meaning.LIBRARY:
            raise LibraryGone from error
        if meaning in (Meaning.LOST, Meaning.RESET_REQUIRED):
            raise DeviceGone(_GONE[meaning]) from error
        return meaning

    def _read(self) -> DeviceSample:
        now = time.time()
        values: Values = {}
        outcomes: list[Meaning | None] = []
        for reader in list(self._readers):
            if self._round % reader.rounds == 0 if reader.rounds else self._round == 0:
                outcomes.append(self._run(reader, values))
            else:
                values |= self._slow.get(reader.name, {})
        if None not in outcomes:
            denied = Meaning.NO_PERMISSION in outcomes
            raise DeviceGone("no_permission" if denied else "driver")
        processes = self._processes()
        self._round += 1
        self._integrate(values)
        return DeviceSample(self.device, now, values, processes=processes)

    def _run(self, reader: Reader, values: Values) -> Meaning | None:
        """Add a reader's values, or say why there are none."""
        try:
            read = reader.read(self._handle)
        except pynvml.NVMLError as error:
            return self._dismiss(reader, error)
        if reader.rounds != 1:
            self._slow[reader.name] = read
        values |= read
        return None

    def _dismiss(self, reader: Reader, error: pynvml.NVMLError) -> Meaning:
        """A reader that will not answer is dropped; any other may do better the next time."""
        meaning = self._judge(error)
        self._slow.pop(reader.name, None)
        if meaning in (Meaning.UNSUPPORTED, Meaning.NO_PERMISSION):
            self._readers.remove(reader)
            if meaning is Meaning.NO_PERMISSION:
                logger.warning("device %s: %s may not be read", self.device.uuid, reader.name)
        elif meaning is Meaning.UNKNOWN:
            self.errors += 1
        return meaning

    def _processes(self) -> tuple[DeviceProcess, ...]:
        try:
            return read_processes(self._handle)
        except pynvml.NVMLError as error:
            self._judge(error)
            return ()

    def _integrate(self, values: Values) -> None:
        """Busy time: the utilization that was read, for the time since the reading before.

        A gap of more than three intervals is not known and adds nothing.
        """
        now = time.monotonic()
        busy_ratio = values.get(("device_utilization_ratio", ()))
        if busy_ratio is None:
            return
        elapsed_s = 0.0 if self._read_at is None else now - self._read_at
        if elapsed_s <= 3 * self._interval_s:
            self._busy_s += busy_ratio * elapsed_s
        self._read_at = now
        values["device_busy_seconds_total", ()] = round(self._busy_s, 6)
