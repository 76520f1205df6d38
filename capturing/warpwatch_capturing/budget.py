"""Limits the cost of a capture before it starts."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from warpwatch_telemetry.captures import CaptureRequest

# Per trace of one rank: steps that would record more events are left out.
MAX_EVENTS = 1_000_000
# Seconds of the training thread per event, to record, stop and export it; options multiply them.
# Medians with torch 2.13 on the CPU, of traces of 150,000 events on a busy machine.
EVENT_S = 8e-6
TIMES = {"shapes": 3.0, "stacks": 2.0, "memory": 2.0}
# A capture may cost as much as the steps take that it records, and this much in any case.
MIN_COST_S = 1.0


class Known(NamedTuple):
    """Events per step, and seconds per event (None: not measured), of a job's traces."""

    events: int
    event_s: float | None = None


class Plan(NamedTuple):
    """The request to the ranks, and its expected cost; None if nothing is known."""

    request: CaptureRequest
    steps: int
    cost_s: float | None = None


def plan(request: CaptureRequest, known: Known | None, step_s: float) -> Plan:
    """Return the request with fewer steps, and without options, where it would cost too much.

    step_s: the job's median step, 0 if it is not known. Options that a user requested are kept.
    """
    if known is None or request.kind != "torch":
        return Plan(request, request.steps)
    limit_s = max(MIN_COST_S, step_s)
    one_s = known.events * (known.event_s or _event_s(request))
    if request.options and request.trigger != "manual" and one_s > limit_s:
        request = replace(request, options=())
        one_s = known.events * EVENT_S
    steps = min(request.steps, MAX_EVENTS // known.events)
    if one_s > step_s:
        steps = min(steps, int(MIN_COST_S // one_s))
    steps = max(1, steps)
    return Plan(request, steps, steps * one_s)


def _event_s(request: CaptureRequest) -> float:
    return EVENT_S * max((TIMES.get(option, 1.0) for option in request.options), default=1.0)
