"""What a ring says of itself, bounded: texts cut, numbers checked, everything else refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from warpwatch.protocol import MAX_PHASES, RECORD_MAX_PAYLOAD, ProtocolError
from warpwatch_telemetry.log import read_places

MAX_TEXT = 128
MAX_WORLD_SIZE = 1 << 20
MAX_PARAMETERS = 10**15
MAX_EVENTS_PER_STEP = 1 << 40
# A longer step than this is no step (12 days).
MAX_DURATION_S = 1e6
# Of Python's garbage collector.
GENERATIONS = (0, 1, 2)
MAX_STEP = 1 << 63
# Of one token or sample.
MAX_FLOPS = 1e24
# What sets the step clock; "other" for what is none of these, empty when it is not said.
STEP_CLOCKS = (
    "step()",
    "lightning",
    "transformers",
    "accelerate",
    "deepspeed",
    "optimizer",
    "dataloader",
    "backward",
)

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_PHASE = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,47}")


@dataclass(frozen=True, slots=True)
class Claims:
    """The metadata of a ring after validation.

    run: which start of the job; master: where its ranks meet, host:port. Empty where not said.
    step_clock: one of STEP_CLOCKS, "other", or empty when it is not known.
    events_per_step: what a recorded step is expected to hold, None when it is not known.
    parallel: per kind of parallelism the rank's place in it, and how many there are.
    flops_per_token, flops_per_sample, parameters, precision: as in RankState.
    held_stacks: the file in the inbox where stacks appear when nothing else can write them.
    """

    job: str
    rank: int
    local_rank: int
    world_size: int
    device: str | None
    host: str
    pod_uid: str | None
    framework: str
    phases: tuple[str, ...]
    run: str = ""
    master: str = ""
    step_clock: str = ""
    events_per_step: int | None = None
    held_stacks: str | None = None
    parallel: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    flops_per_token: float = 0.0
    flops_per_sample: float = 0.0
    parameters: int = 0
    precision: str = ""


def parse(text: bytes | None, pod_uid: str | None = None) -> Claims:
    """Raises ProtocolError("bad_metadata") when the text is not what the protocol says.

    ``pod_uid``: the pod that the folder belongs to, whatever the text says of it.
    """
    try:
        raw = json.loads(text or b"")
    except (ValueError, RecursionError) as error:
        raise ProtocolError("bad_metadata", "the metadata is not JSON") from error
    if not isinstance(raw, dict):
        raise ProtocolError("bad_metadata", "the metadata is no object")
    world_size = max(1, _integer(raw, "world_size", 1, MAX_WORLD_SIZE))
    rank = _integer(raw, "rank", 0, MAX_WORLD_SIZE)
    if rank >= world_size:
        raise ProtocolError("bad_metadata", f"there is no rank {rank} in a world of {world_size}")
    return Claims(
        job=_text(raw, "job") or "unnamed",
        rank=rank,
        local_rank=_integer(raw, "local_rank", 0, MAX_WORLD_SIZE),
        world_size=world_size,
        device=_text(raw, "device") or None,
        host=_text(raw, "hostname"),
        pod_uid=pod_uid or _text(raw, "pod_uid") or None,
        framework=_text(raw, "torch"),
        phases=_phases(raw.get("phases", [])),
        run=_text(raw, "run"),
        master=_text(raw, "master"),
        step_clock=_step_clock(raw),
        events_per_step=_integer(raw, "events_per_step", 0, MAX_EVENTS_PER_STEP) or None,
        held_stacks=_text(raw, "held_stacks") or None,
        parallel=_parallel(raw.get("parallel", {})),
        flops_per_token=_flops(raw, "flops_per_token"),
        flops_per_sample=_flops(raw, "flops_per_sample"),
        parameters=_integer(raw, "parameters", 0, MAX_PARAMETERS),
        precision=_text(raw, "precision"),
    )


def parse_event(payload: bytes) -> dict[str, Any]:
    """An event's fields, flat and bounded. Raises ProtocolError("bad_event")."""
    try:
        raw = json.loads(payload[:RECORD_MAX_PAYLOAD])
    except (ValueError, RecursionError) as error:
        raise ProtocolError("bad_event", "the event is not JSON") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("event"), str):
        raise ProtocolError("bad_event", "the event has no name")
    return {
        clean(key): clean(value) if isinstance(value, str) else value
        for key, value in raw.items()
        if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    }


def is_gc_pause(fields: dict[str, Any]) -> bool:
    """Whether an event's fields are those of a pause of the garbage collector."""
    return (
        _is_within(fields.get("duration_s"), MAX_DURATION_S)
        and fields.get("generation") in GENERATIONS
        and _is_within(fields.get("step", 0), MAX_STEP)
    )


def _is_within(value: Any, limit: float) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= limit


def with_phase(phases: list[str], payload: bytes) -> list[str]:
    """The phases with the one that a phase record defines; a record that makes no sense: as is."""
    index = int.from_bytes(payload[:8], "little")
    name = payload[8:].decode(errors="replace")
    if index != len(phases) or index >= MAX_PHASES or not _PHASE.fullmatch(name):
        return phases
    return [*phases, name]


def clean(text: str) -> str:
    """One line of at most MAX_TEXT characters."""
    return _CONTROL.sub(" ", text)[:MAX_TEXT].strip()


def _text(raw: dict[str, Any], key: str) -> str:
    value = raw.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ProtocolError("bad_metadata", f"{key} is no text")
    return clean(value)


def _integer(raw: dict[str, Any], key: str, default: int, limit: int) -> int:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise ProtocolError("bad_metadata", f"{key} is no number from 0 to {limit}")
    return value


def _flops(raw: dict[str, Any], key: str) -> float:
    value = raw.get(key, 0.0)
    if not _is_within(value, MAX_FLOPS):
        raise ProtocolError("bad_metadata", f"{key} is no number from 0 to {MAX_FLOPS:g}")
    return float(value)


def _step_clock(raw: dict[str, Any]) -> str:
    said = _text(raw, "step_clock")
    return said if said in STEP_CLOCKS or not said else "other"


def _parallel(raw: Any) -> Mapping[str, tuple[int, int]]:
    try:
        return read_places(raw, "parallel")
    except ValueError as error:
        raise ProtocolError("bad_metadata", str(error)) from None


def _phases(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list) or len(raw) > MAX_PHASES:
        raise ProtocolError("bad_metadata", f"phases is no list of at most {MAX_PHASES}")
    for name in raw:
        if not isinstance(name, str) or not _PHASE.fullmatch(name):
            raise ProtocolError("bad_metadata", "a phase's name is not a word")
    return tuple(raw)
