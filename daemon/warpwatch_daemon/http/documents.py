"""Telemetry as JSON documents, the way the API shows it.

A document has the fields of its dataclass. Series are keyed as in the telemetry log, e.g.
``clock_hertz{domain=sm}``; a number that is not finite is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from warpwatch_detection.anomalies.register_state import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, Decision
from warpwatch_telemetry.log import series_text
from warpwatch_telemetry.samples import DeviceSample

Document = dict[str, Any]


def plain(value: Any) -> Any:
    """Dataclasses, mappings and sequences as what ``json.dumps`` takes."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def device(sample: DeviceSample) -> Document:
    """What identifies the device stands beside its values, not in an object of its own."""
    document: Document = plain(sample)
    identity: Document = document.pop("device")
    return identity | document


def anomalies(found: Sequence[Anomaly], decisions: Sequence[Decision]) -> list[Document]:
    """Each with what became of its trigger, null where nothing was decided."""
    decided = {decision.anomaly_id: plain(decision) for decision in decisions}
    return [plain(anomaly) | {"decision": decided.get(anomaly.id)} for anomaly in found]


def detectors(
    statuses: Mapping[str, Sequence[DetectorStatus]],
    suppressed: Sequence[Suppressed],
    job: str | None,
    kind: str | None,
) -> Document:
    """How each detector sees what it judges, and what is found and explained by something else."""
    return {
        "detectors": [
            {"kind": name, "readings": [plain(one) for one in some if job in (None, one.job)]}
            for name, some in statuses.items()
            if kind in (None, name)
        ],
        "suppressed": [
            plain(one) for one in suppressed if job in (None, one.job) and kind in (None, one.kind)
        ],
    }


def diagnosis(capture: Capture) -> Document:
    """The diagnosis of a capture, with what it is about."""
    return {
        "capture": capture.id,
        "job": capture.request.job,
        "time": capture.time,
        "outcome": capture.diagnosis_outcome,
        "diagnosis": plain(capture.diagnosis),
    }


def _key(key: Any) -> str:
    return series_text(key) if isinstance(key, tuple) else str(key)
