"""All checks in the order in which they run, and how long each may take."""

from __future__ import annotations

# Seconds; what a check has measured by then is kept. Together they fit into ten minutes.
TIMEOUTS_S = {
    "doctor": 30.0,
    "readers": 60.0,
    "calls": 45.0,
    "fields": 60.0,
    "gpm": 45.0,
    "footprint": 60.0,
    "shim": 80.0,
    "models": 150.0,
    "capture": 150.0,
}
# All of them: on a machine that slows each of them down, the last ones are cut short.
BUDGET_S = 570.0
