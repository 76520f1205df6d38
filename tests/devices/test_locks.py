"""State that several threads share is used only with its lock."""

import pytest

from tests.devices.recording import RecordingSink
from tests.locks import Waits, held
from warpwatch_devices.attribution.source import AttributionSource
from warpwatch_devices.config import AttributionConfig
from warpwatch_devices.nvml.source import SessionSink
from warpwatch_devices.source import SourceContext
from warpwatch_telemetry.samples import Device, DeviceSample

SAMPLE = DeviceSample(Device("GPU-1", 0, "L4"), 0.0, source="dcgm")


def test_a_report_of_an_origin_waits_for_the_thread_that_has_the_lock() -> None:
    around = SourceContext(lambda _: None, tuple, lambda: False, lambda _: None)
    source = AttributionSource(AttributionConfig(), around)
    source._lock = held()
    with pytest.raises(Waits):
        source._report(RecordingSink())("kubelet", "away", 0.0)


def test_a_closed_session_publishes_nothing() -> None:
    sink = RecordingSink()
    session = SessionSink(sink)
    session.publish_device(SAMPLE)
    session.forget_device("GPU-1", "dcgm")
    session.close()
    session.publish_device(SAMPLE)
    session.forget_device("GPU-2")
    assert (sink.devices, sink.forgotten) == ({}, ["GPU-1"])
