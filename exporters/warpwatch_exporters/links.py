"""Links to the pages of anomalies and captures, below the public address of their owner.

Without that address the functions return an empty text.
"""

from __future__ import annotations

from urllib.parse import quote

from warpwatch_telemetry.captures import Capture


def of_anomaly(public_url: str, anomaly_id: str) -> str:
    """Return the page, with this anomaly on top."""
    return _below(public_url, f"/?show={quote(anomaly_id, safe='')}#findings")


def of_capture(public_url: str, capture: Capture) -> str:
    """Return its report, else the page with this capture on top of the captures."""
    ident = quote(capture.id, safe="")
    if "report.html" in capture.files:
        return _below(public_url, f"/api/v1/captures/{ident}/report.html")
    return _below(public_url, f"/?show={ident}#captures")


def _below(public_url: str, path: str) -> str:
    return public_url.rstrip("/") + path if public_url else ""
