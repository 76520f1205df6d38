"""Where people read of an anomaly and of a capture: below the public address of who has it."""

from __future__ import annotations

from urllib.parse import quote

from warpwatch_telemetry.captures import Capture


def of_anomaly(anomaly_id: str) -> str:
    """The page, with this one on top."""
    return f"/?show={quote(anomaly_id, safe='')}#findings"


def of_capture(capture: Capture) -> str:
    """Its report, else the page with this one on top of the captures."""
    ident = quote(capture.id, safe="")
    if "report.html" in capture.files:
        return f"/api/v1/captures/{ident}/report.html"
    return f"/?show={ident}#captures"
