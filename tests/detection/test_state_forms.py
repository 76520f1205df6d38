"""Detectors keep their memory over an upgrade, unless a state has another version."""

import dataclasses
import re
import typing
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from warpwatch_detection.anomalies import snapshot
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.engine import Detection

KEPT = Path(__file__).parent / "logs" / "detectors-0.2.0.state"
# Their states had another form in 0.2.0.
CHANGED = {"memory_leak", "straggler", "thermal_throttle", "power_brake"}


def test_a_state_of_0_2_0_is_read_whatever_the_configuration_is_now():
    strict = DetectionConfig(false_alarms_per_job_day=0.1)
    detection = Detection(strict, AnomaliesConfig())
    body = zlib.decompress(KEPT.read_bytes())
    saved = msgspec.msgpack.decode(body, type=snapshot.Snapshot)
    parts = detection.parts()
    fresh = snapshot.restore(saved, parts)
    assert fresh == CHANGED | (parts.keys() - saved.parts.keys())
    assert [one.kind for one in detection.active] == ["crash"]
    (regression,) = (one for one in detection.runner.detectors if one.kind == "step_regression")
    assert len(regression.state.jobs) == 1


def test_a_state_of_another_version_or_that_cannot_be_read_is_left_to_its_detector_alone():
    detection = Detection(DetectionConfig(), AnomaliesConfig())
    next(one for one in detection.runner.detectors if one.kind == "xid").state = 2**70
    saved = msgspec.msgpack.decode(snapshot.save(detection.parts()), type=snapshot.Snapshot)
    for changed in ({"version": 99}, {"state": msgspec.Raw(msgspec.msgpack.encode(7))}):
        hang = msgspec.structs.replace(saved.parts["hang"], **changed)
        other = snapshot.Snapshot({**saved.parts, "hang": hang})
        fresh = Detection(DetectionConfig(), AnomaliesConfig())
        assert snapshot.restore(other, fresh.parts()) == {"hang", "xid"}


def test_a_state_of_another_form_has_another_version(golden):
    """If this fails, raise ``state_version`` of the detector, then run with --update-golden."""
    parts = Detection(DetectionConfig(), AnomaliesConfig()).parts()
    forms = [
        f"{name} {part.state_version}\n" + "".join(f"  {line}\n" for line in form(part))
        for name, part in sorted(parts.items())
    ]
    golden("detection/state_forms.txt", "\n".join(forms).encode())


def form(part: snapshot.Stateful) -> list[str]:
    """Return the fields of a state, and of all that it is made of, with their types."""
    found: dict[str, str] = {}
    waiting = list(named(part.state_form))
    while waiting:
        one = waiting.pop()
        if one.__qualname__ not in found:
            hints = typing.get_type_hints(one)
            fields = ", ".join(f"{name}: {hint}" for name, hint in hints.items())
            # A module may be renamed.
            found[one.__qualname__] = re.sub(r"warpwatch_[\w.]+\.", "", fields)
            waiting += [inner for hint in hints.values() for inner in named(hint)]
    return [f"{name}: {fields}" for name, fields in sorted(found.items())]


def named(hint: Any) -> Iterator[type]:
    """Yield the classes with fields in a type hint."""
    if isinstance(hint, type) and (
        dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct)
    ):
        yield hint
    if origin := typing.get_origin(hint):
        yield from named(origin)
    for inner in typing.get_args(hint):
        yield from named(inner)
