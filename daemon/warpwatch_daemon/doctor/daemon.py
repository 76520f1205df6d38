"""What the running daemon reports of itself: its version, and what it cannot read."""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_daemon.doctor.check import Check, CheckInputs
from warpwatch_telemetry.errors import WarpwatchError


def checks(inputs: CheckInputs) -> Iterator[Check]:
    api = inputs.api
    try:
        health, ready = api.get("/healthz"), api.get("/readyz", accepted=503)
    except WarpwatchError as error:
        detail, _, advice = str(error).partition("; ")
        # A node is examined with or without a daemon; a URL is of one that should be there.
        yield Check("daemon", None if inputs.here else False, detail, advice)
    else:
        yield Check("daemon", True, f"version {health['version']} at {api.where}")
        for missing in ready["missing"]:
            name, _, reason = missing.partition(": ")
            yield Check(name, False, f"the daemon cannot read it: {reason or missing}")
    if not inputs.here:
        advice = "on its node, as its user: `warpwatch doctor` without --url and WARPWATCH_URL"
        detail = f"not examined: no daemon with a socket here is the one at {api.url}"
        yield Check("this machine", None, detail, advice)
