"""All targets: who reads what a stranger wrote. Each is a module with ``target(folder)``."""

from __future__ import annotations

TARGETS = (
    "rings",
    "commands",
    "traces",
    "diagnoses",
    "config",
    "web_config",
    "http",
    "alerts",
    "kubelet",
    "dcgm_pages",
    "telemetry_log",
)
# Of the tests of the campaigns themselves.
BROKEN = "broken"
