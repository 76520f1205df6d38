"""What every surface says of an anomaly: its cause, where, whose, and since when.

``XID 79 (GPU has fallen off the bus): GPU 2 on gpu-155, rank 1234 of llama-70b (ns/team), since
03:12 UTC on 20 Nov``
"""

from __future__ import annotations

import time

from warpwatch_telemetry.anomalies import DEVICE_KINDS, Anomaly

# A cause may hold an exception's text; what comes after it must not be cut off.
MAX_CAUSE_CHARS = 200


def sentence(anomaly: Anomaly, node: str = "") -> str:
    """Return the sentence, then what speaks for the cause and what the fault does.

    node: of the agent that found it, where the anomaly does not name its own.
    """
    cause, _, more = anomaly.summary.partition("; ")
    said = _said(anomaly, cause, node)
    return f"{said}; {more}" if more else said


def first_sentence(anomaly: Anomaly, node: str = "") -> str:
    """Return the sentence with the cause as it was first found, for a label: it never changes."""
    cause, _, _ = anomaly.first_summary.partition("; ")
    return _said(anomaly, cause or anomaly.kind.replace("_", " "), node)


def _said(anomaly: Anomaly, cause: str, node: str) -> str:
    if len(cause) > MAX_CAUSE_CHARS:
        cause = f"{cause[: MAX_CAUSE_CHARS - 1]}…"
    # What a fleet finds without a node is on several.
    node = anomaly.node or ("" if anomaly.judged_by == "fleet" else node)
    said = f"{cause}: {', '.join((*_places(anomaly, node), _when(anomaly)))}"
    # Exceptions have several lines, and names may.
    return " ".join(said.split())


def _places(anomaly: Anomaly, node: str) -> list[str]:
    """Return the device and the rank or job, the first of them with the node."""
    device = f"GPU {anomaly.gpu}" if anomaly.gpu is not None else ""
    if not device and anomaly.kind in DEVICE_KINDS:
        device = anomaly.device or ""
    rank = "" if anomaly.rank is None else f"rank {anomaly.rank} of "
    owner = f" ({anomaly.owner})" if anomaly.owner else ""
    whose = "" if anomaly.job is None else f"{rank}{anomaly.job}{owner}"
    places = [place for place in (device, whose) if place]
    if node:
        places[:1] = [" ".join((*places[:1], "on", node))]
    return places


def _when(anomaly: Anomaly) -> str:
    begin = _utc(anomaly.time)
    if anomaly.end_time is None:
        return f"since {begin}"
    end = _utc(anomaly.end_time)
    if begin[5:] == end[5:]:
        begin = begin[:5]
    return f"from {begin} to {end}"


def _utc(wall_s: float) -> str:
    """Return the minute and the day; agents may report a time that no calendar has."""
    try:
        return time.strftime("%H:%M UTC on %d %b", time.gmtime(wall_s))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
