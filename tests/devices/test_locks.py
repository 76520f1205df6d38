"""What several threads share is touched only with its lock."""

from typing import Any

import pytest

from tests.devices.recording import RecordingSink
from tests.locks import Held, Waits
from warpwatch_devices.attribution.source import AttributionSource
from warpwatch_devices.config import AttributionConfig
from warpwatch_devices.nvml.source import SessionSink
from warpwatch_devices.source import SourceContext
from warpwatch_devices.xids import XidLedger
from warpwatch_telemetry.samples import Device, DeviceSample

CALLS: dict[type, dict[str, tuple[object, ...]]] = {
    XidLedger: {
        **{"register": ("GPU-1", "0000:1a:00"), "watched": ("nvml",), "values": ("GPU-1",)},
        **{"observe": ("0000:1a:00", 79, "nvml"), "recall": ("0000:1a:00", 79, 1.0)},
        **{"forget_recalled": (), "observe_health": ("GPU-1", "fatal_poison")},
    },
    SessionSink: {
        **{"publish_device": (DeviceSample(Device("GPU-1", 0, "L4"), 0.0),)},
        **{"forget_device": ("GPU-1",), "close": ()},
    },
}


@pytest.mark.parametrize("shared", CALLS)
def test_every_method_waits_for_the_thread_that_has_the_lock(shared: Any) -> None:
    for name, arguments in CALLS[shared].items():
        held = shared(RecordingSink()) if shared is SessionSink else shared()
        held._lock = Held()
        with pytest.raises(Waits):
            getattr(held, name)(*arguments)


def test_reports_of_origins_wait_for_each_other_and_a_closed_session_publishes_nothing() -> None:
    around = SourceContext(lambda _: None, tuple, lambda: False, lambda _: None)
    source = AttributionSource(AttributionConfig(), around)
    source._lock = Held()  # type: ignore[assignment]
    with pytest.raises(Waits):
        source._report(RecordingSink())("kubelet", "away", 0.0)
    sink = RecordingSink()
    session = SessionSink(sink)
    session.publish_device(DeviceSample(Device("GPU-1", 0, "L4"), 0.0, source="dcgm"))
    session.forget_device("GPU-1", "dcgm")
    session.close()
    session.publish_device(DeviceSample(Device("GPU-2", 0, "L4"), 0.0))
    session.forget_device("GPU-2")
    assert (sink.devices, sink.forgotten) == ({}, ["GPU-1"])
