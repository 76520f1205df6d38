"""All checks in the order in which they run, and how long each may take."""

from __future__ import annotations

# Seconds; what a check has measured by then is kept. Together they fit into ten minutes.
TIMEOUTS_S = {
    "doctor": 30.0,
    "readers": 60.0,
    "calls": 60.0,
    "fields": 70.0,
    "gpm": 60.0,
    "footprint": 90.0,
    "shim": 80.0,
    "capture": 180.0,
}
# All of them: on a machine that slows each of them down, the last ones are cut short.
BUDGET_S = 570.0
