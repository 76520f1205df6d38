"""What a generation of NVML publishes through: closed with it, so that a call which returns long
after speaks for none."""

from __future__ import annotations

import threading

from warpwatch_devices.source import DeviceSink
from warpwatch_telemetry.samples import DeviceSample


class GenerationSink:
    """Hands on to ``sink`` until ``close``."""

    def __init__(self, sink: DeviceSink) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._closed = False
        self._retired: set[str] = set()

    def close(self) -> None:
        """Returns when nothing is being published any more."""
        with self._lock:
            self._closed = True

    def retire(self, uuid: str) -> None:
        """Forget the device, also after ``close``, and take nothing of it any more."""
        with self._lock:
            self._retired.add(uuid)
            self._sink.forget_device(uuid)

    def welcome(self, uuid: str) -> None:
        """Take of the device again."""
        with self._lock:
            self._retired.discard(uuid)

    def publish_device(self, sample: DeviceSample) -> None:
        with self._lock:
            if not self._closed and sample.device.uuid not in self._retired:
                self._sink.publish_device(sample)

    def forget_device(self, uuid: str, source: str = "nvml") -> None:
        with self._lock:
            if not self._closed:
                self._sink.forget_device(uuid, source)

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        with self._lock:
            if not self._closed:
                self._sink.count(name, *labels, by=by)
