"""What functions of the telemetry and the runtime return, as a golden file."""

from dataclasses import replace

from tests import expressions
from tests.conftest import Cases
from warpwatch_runtime import http_requests, loading, log_output
from warpwatch_telemetry import (
    alerts,
    anomalies,
    bus_messages,
    captures,
    catalogue,
    clean_text,
    errors,
    jobs,
    log,
    records,
    samples,
    state,
    stream,
    xids,
)  # fmt: skip

MODULES = (
    alerts, anomalies, bus_messages, captures, catalogue, clean_text, errors, jobs, log, records,
    samples, state, stream, xids, http_requests, loading, log_output,
)  # fmt: skip


def test_functions_return_the_golden_values(cases: Cases) -> None:
    expressions.check(cases, "telemetry/functions.txt", *MODULES, replace=replace)
