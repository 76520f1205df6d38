"""State that several threads share is used only with its lock."""

import pytest

from tests.devices.recording import RecordingSink
from tests.locks import Waits, held
from warpwatch_devices.attribution.source import AttributionSource
from warpwatch_devices.config import AttributionConfig
from warpwatch_devices.nvml.source import SessionSink
from warpwatch_devices.source import SourceContext
from warpwatch_devices.xids import XidLedger
from warpwatch_telemetry.samples import Device, DeviceSample

SAMPLE = DeviceSample(Device("GPU-1", 0, "L4"), 0.0, source="dcgm")


def test_every_method_waits_for_the_thread_that_has_the_lock() -> None:
    around = SourceContext(lambda _: None, tuple, lambda: False, lambda _: None)
    source = AttributionSource(AttributionConfig(), around)
    ledger, session = XidLedger(), SessionSink(RecordingSink())
    for shared in (source, ledger, session):
        shared._lock = held()
    for call, arguments in (
        (source._report(RecordingSink()), ("kubelet", "away", 0.0)),
        (ledger.register, ("GPU-1", "0000:1a:00")),
        (ledger.watched, ("nvml",)),
        (ledger.observe, ("0000:1a:00", 79, "nvml")),
        (ledger.recall, ("0000:1a:00", 79, 1.0)),
        (ledger.forget_recalled, ()),
        (ledger.observe_health, ("GPU-1", "fatal_poison")),
        (ledger.values, ("GPU-1",)),
        (session.publish_device, (SAMPLE,)),
        (session.forget_device, ("GPU-1",)),
        (session.close, ()),
    ):
        with pytest.raises(Waits):
            call(*arguments)


def test_a_closed_session_publishes_nothing() -> None:
    sink = RecordingSink()
    session = SessionSink(sink)
    session.publish_device(SAMPLE)
    session.forget_device("GPU-1", "dcgm")
    session.close()
    session.publish_device(SAMPLE)
    session.forget_device("GPU-2")
    assert (sink.devices, sink.forgotten) == ({}, ["GPU-1"])
