"""A GPU that needs service stays so until it is seen healthy after it, or is resolved by hand."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from tests.detection.gpus import Metrics, Node, key
from tests.detection.streams import alone, fed, opened, restarted
from warpwatch_detection.engine import Detection
from warpwatch_telemetry.anomalies import KINDS, Anomaly
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.records import DeviceReading

ACTION = key("recovery_action")
FELL = key("xid_errors_total", "79")
ERRORS = key("ecc_errors_total", "uncorrected")
OTHERS = set(KINDS) - {"device_needs_service"}
FALLEN = "XID 79 (GPU has fallen off the bus), needs a reboot"


class Gpus(Node):
    """Two GPUs; reports about the broken one last."""

    def __init__(self) -> None:
        super().__init__()
        self.load, self.slot, self.broken_uuid = "boot-1/4711", "0000:1a:00.0", self.uuid
        self.values: dict[tuple[str, tuple[str, ...]], float] = {}
        self.reason = ""

    def changed(self, **changes: str) -> Gpus:
        for name, value in changes.items():
            setattr(self, name, value)
        return self

    def read(self, seconds: float = 60.0) -> Iterator[DeviceReading]:
        for one in self.readings(seconds, lambda *_: self.values, interval_s=10.0):
            known = {} if self.reason else one.metrics
            if one.device == self.uuid:
                yield DeviceReading(
                    one.time, self.broken_uuid, known, not self.reason, self.reason,
                    driver_load=self.load, slot=self.slot,
                )  # fmt: skip
            else:
                yield msgspec.structs.replace(one, driver_load=self.load, slot="0000:1b:00.0")

    def shows(self, values: Metrics) -> None:
        self.values.update(values)


def begun() -> tuple[Gpus, Detection]:
    gpus, engine = Gpus(), alone("device_needs_service")
    assert opened(engine, [*gpus.seen(), *gpus.read()]) == []
    return gpus, engine


def active(engine: Detection) -> list[str]:
    return [one.summary for one in engine.active]


def falls(gpus: Gpus, engine: Detection) -> Anomaly:
    gpus.shows({FELL: 1.0})
    (anomaly,) = opened(engine, gpus.read())
    assert (anomaly.kind, anomaly.severity, anomaly.rank) == ("device_needs_service", "critical", 1)
    assert active(engine) == [FALLEN]
    return anomaly


@pytest.mark.parametrize(
    ("service", "values"),
    [
        ({"load": "boot-2/4711"}, {}),
        ({"load": "boot-1/5000"}, {}),
        ({}, {ERRORS: 0.0}),
        ({"broken_uuid": "GPU-new"}, {}),
    ],
    ids=["rebooted", "driver loaded again", "reset", "replaced"],
)
def test_an_xid_that_needs_service_lasts_over_restarts_until_the_gpu_is_healthy_after_it(
    service, values
):
    gpus, engine = begun()
    gpus.shows({ERRORS: 2.0})
    opened(engine, gpus.read())
    anomaly = falls(gpus, engine)
    # Well again by itself, for hours; the daemon is upgraded; the node is up and the GPU is not.
    fed(engine, gpus.read(9000))
    engine, closed = restarted(engine, gpus.time, disabled=OTHERS)
    assert closed == []
    gpus.shows({FELL: 0.0, **values})
    fed(engine, gpus.changed(reason="lost", load=service.get("load", gpus.load)).read())
    assert [one.id for one in engine.active] == [anomaly.id]
    fed(engine, gpus.changed(reason="", **service).read())
    assert active(engine) == []
    assert opened(engine, gpus.read()) == []
    # A GPU that falls again, however soon, needs service again.
    gpus.shows({FELL: 1.0})
    assert [one.id == anomaly.id for one in opened(engine, gpus.read())] == [False]


def test_a_person_resolves_it_and_what_is_asked_for_anew_is_another_one():
    gpus, engine = begun()
    anomaly = falls(gpus, engine)
    gpus.shows({ACTION: 2.0})
    fed(engine, gpus.read())
    (change,) = engine.resolve(anomaly.id, gpus.time, "uid 0")
    assert (change.what, change.anomaly.end_time) == ("closed", gpus.time)
    assert change.anomaly.summary.endswith("reboot of the node, resolved by uid 0")
    engine, _ = restarted(engine, gpus.time, disabled=OTHERS)
    assert opened(engine, gpus.read()) == []
    gpus.shows({ACTION: 1.0})
    (another,) = opened(engine, gpus.read())
    assert another.id != anomaly.id
    with pytest.raises(Refused, match="no such active anomaly"):
        engine.resolve(anomaly.id, gpus.time, "uid 0")


def test_other_kinds_end_by_themselves():
    gpus, engine = Gpus(), alone("device_lost")
    fed(engine, [*gpus.read(), *gpus.changed(reason="lost").read()])
    with pytest.raises(Refused, match="device_lost ends when it is over") as refused:
        engine.resolve(engine.active[0].id, gpus.time, "uid 0")
    assert refused.value.reason == "ends_by_itself"
