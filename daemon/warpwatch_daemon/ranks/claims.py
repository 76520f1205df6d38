"""Validates what a ring says: its metadata, events and records, all bounded.

Unknown is absent: None, or no such key. A number too large for the telemetry's records is
unknown.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from warpwatch import protocol
from warpwatch.protocol import ABSENT, MAX_PHASES, RECORD_MAX_PAYLOAD, ProtocolError
from warpwatch_telemetry import clean_text
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.log import read_places
from warpwatch_telemetry.records import MAX_INTEGER, JobKind, Role, Serve, Step, WorkClass

MAX_TEXT = 128
MAX_WORLD_SIZE = 1 << 20
MAX_PARAMETERS = 10**15
MAX_EVENTS_PER_STEP = 1 << 40
# 12 days: a longer duration is not a step.
MAX_DURATION_S = 1e6
# The generations of Python's garbage collector.
GENERATIONS = (0, 1, 2)
MAX_STEP = 1 << 63
# For one token or sample.
MAX_FLOPS = 1e24
# The known step clocks; others become "other", a missing one is empty.
STEP_CLOCKS = (
    "step()",
    "lightning",
    "transformers",
    "accelerate",
    "deepspeed",
    "optimizer",
    "dataloader",
    "backward",
    "iteration()",
)

_PHASE = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,47}")


_Number = Annotated[int, Meta(ge=0, le=MAX_WORLD_SIZE)]
_Flops = Annotated[float, Meta(ge=0, le=MAX_FLOPS)]
_Phase = Annotated[str, Meta(pattern=rf"\A{_PHASE.pattern}\Z")]


class Claims(
    msgspec.Struct, frozen=True, kw_only=True, rename={"host": "hostname", "framework": "torch"}
):
    """The metadata of a ring after validation; fields without a note are those of RankState.

    run: the start of the job; master: host:port where its ranks meet. Empty if unknown.
    step_clock: one of STEP_CLOCKS, "other", or empty if unknown.
    events_per_step: expected in a recorded step, 0 if unknown.
    client: the version of the shim.
    held_stacks: the file in the inbox for stacks that nothing else can write.
    kind: train or serve; the next three are of ServeState.
    """

    job: str = "unnamed"
    rank: _Number = 0
    local_rank: _Number = 0
    world_size: _Number = 1
    device: str | None = None
    host: str = ""
    pod_uid: str | None = None
    framework: str = ""
    phases: Annotated[tuple[_Phase, ...], Meta(max_length=MAX_PHASES)] = ()
    run: str = ""
    master: str = ""
    step_clock: str = ""
    events_per_step: Annotated[int, Meta(ge=0, le=MAX_EVENTS_PER_STEP)] = 0
    steps_elsewhere: Annotated[int, Meta(ge=0, lt=1 << 48)] = 0
    held_stacks: str | None = None
    parallel: Mapping[str, tuple[int, int]] = {}
    flops_per_token: _Flops = 0.0
    flops_per_sample: _Flops = 0.0
    parameters: Annotated[int, Meta(ge=0, le=MAX_PARAMETERS)] = 0
    precision: str = ""
    client: str = ""
    kind: JobKind = "train"
    role: Role = "rank"
    server: str = ""
    note: str = ""

    def shown(self) -> dict[str, Any]:
        """Return the fields that RankState has under the same name."""
        return {name: getattr(self, name) for name in _SHOWN}


_SHOWN = (
    *("host", "local_rank", "world_size", "device", "pod_uid", "framework", "step_clock"),
    *("steps_elsewhere", "parallel", "client"),
    *("flops_per_token", "flops_per_sample", "parameters", "precision"),
)


def parse(text: bytes | None, pod_uid: str | None = None) -> Claims:
    """Return the claims of a text. Raises ProtocolError("bad_metadata").

    ``pod_uid``: the pod that owns the folder; it replaces the pod of the text.
    """
    try:
        raw = json.loads(text or b"")
    except (ValueError, RecursionError) as error:
        raise ProtocolError("bad_metadata", "the metadata is not JSON") from error
    if not isinstance(raw, dict):
        raise ProtocolError("bad_metadata", "the metadata is not an object")
    cleaned = {key: clean(said) if isinstance(said, str) else said for key, said in raw.items()}
    # Null, an empty text and zero mean unknown.
    known = {key: said for key, said in cleaned.items() if said not in (None, "", 0)}
    try:
        known["parallel"] = read_places(known.get("parallel", {}), "parallel")
        clock = known.get("step_clock")
        if isinstance(clock, str) and clock not in STEP_CLOCKS:
            known["step_clock"] = "other"
        claims = msgspec.convert(known | ({"pod_uid": pod_uid} if pod_uid else {}), Claims)
    except ValueError as error:
        raise ProtocolError("bad_metadata", str(error)) from error
    if claims.rank >= claims.world_size:
        detail = f"there is no rank {claims.rank} in a world of {claims.world_size}"
        raise ProtocolError("bad_metadata", detail)
    return claims


def parse_event(payload: bytes) -> dict[str, Any]:
    """Return an event's fields, flat and bounded. Raises ProtocolError("bad_event")."""
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
    """Return whether an event's fields are those of a pause of the garbage collector."""
    return (
        _is_within(fields.get("duration_s"), MAX_DURATION_S)
        and fields.get("generation") in GENERATIONS
        and _is_within(fields.get("step", 0), MAX_STEP)
    )


def _is_within(value: Any, limit: float) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= limit


def with_phase(phases: list[str], payload: bytes) -> list[str]:
    """Return the phases with the one that a valid phase record adds."""
    index = int.from_bytes(payload[:8], "little")
    name = payload[8:].decode(errors="replace")
    if index != len(phases) or index >= MAX_PHASES or not _PHASE.fullmatch(name):
        return phases
    return [*phases, name]


def clean(text: str) -> str:
    """Return one line of at most MAX_TEXT characters."""
    return clean_text.clean(text, MAX_TEXT)


_NO_COUNTS: Mapping[str, int] = {}


class AllocatorMemory(NamedTuple):
    """Bytes of a process's allocator. inactive_split: free parts of blocks that are in use."""

    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    inactive_split: int | None = None


def parse_step(
    record: protocol.RecordHead, time: float, job: JobId, rank: int, phases: Sequence[str]
) -> Step:
    """Return the step or iteration of a record. Raises ProtocolError("bad_record")."""
    payload, end = record.payload, protocol.STEP.size
    prefill = decoded = kv = 0
    is_iteration = record.type == protocol.RECORD_ITERATION
    if len(payload) < end + is_iteration * protocol.WORK.size:
        raise protocol.ProtocolError("bad_record", "a step record is too short")
    if is_iteration:
        prefill, decoded, kv = map(_count, protocol.WORK.unpack_from(payload, end))
        end += protocol.WORK.size
    number, ns, gpu_ns, allocated, samples, tokens = protocol.STEP.unpack_from(payload)
    if ns > MAX_DURATION_S * 1e9 or number > MAX_INTEGER:
        raise protocol.ProtocolError("bad_record", f"step {number} of {ns} ns")
    return Step(
        time,
        job.name,
        rank,
        number,
        ns / 1e9,
        gpu_ns / 1e9 if gpu_ns <= MAX_DURATION_S * 1e9 else None,
        _phases(payload[end:], phases),
        _known(allocated),
        _count(samples),
        _count(tokens),
        bool(record.flags & protocol.FLAG_PROFILED),
        job.owner,
        job.run,
        _work_class(prefill, decoded) if is_iteration else "",
        prefill,
        decoded,
        kv,
    )


def _work_class(prefill_tokens: int, decode_requests: int) -> WorkClass:
    if prefill_tokens and decode_requests:
        return "mixed"
    return "prefill" if prefill_tokens else "decode"


def parse_serve(payload: bytes, time: float, job: JobId, rank: int) -> tuple[Serve, bool] | None:
    """Return one second of a server without its iterations, and whether it knows the requests.

    That of the scheduler does. Returns None if the payload is too short.
    """
    if len(payload) < protocol.SERVE.size:
        return None
    ns, idle_ns, running, waiting, usage, *counts = protocol.SERVE.unpack_from(payload)
    preemptions, hits, queries, prompt, generated, *sums_ns = map(_count, counts)
    interval_s = _seconds(ns)
    first, inter, queue = _buckets(payload[protocol.SERVE.size :])
    second = Serve(
        time, job.name, rank, interval_s, min(_seconds(idle_ns), interval_s),
        _count(running), _count(waiting), usage / 1e9 if usage <= 10**9 else None,
        preemptions, hits, queries, prompt, generated,
        first_token=first, first_token_s=_seconds(sums_ns[0]),
        inter_token=inter, inter_token_s=_seconds(sums_ns[1]),
        queue=queue, queue_s=_seconds(sums_ns[2]), owner=job.owner, run=job.run,
    )  # fmt: skip
    return second, running < ABSENT


def _buckets(raw: bytes) -> tuple[dict[int, int], ...]:
    """Return the observations by bucket of each of LATENCIES; wrong entries are ignored."""
    found: tuple[dict[int, int], ...] = tuple({} for _ in protocol.LATENCIES)
    size = protocol.BUCKET.size
    for place, bucket, count in protocol.BUCKET.iter_unpack(raw[: len(raw) // size * size]):
        if place < len(found) and bucket <= len(protocol.LATENCY_BOUNDS_S):
            found[place][bucket] = found[place].get(bucket, 0) + count
    return found


def _seconds(nanoseconds: int) -> float:
    return nanoseconds / 1e9 if nanoseconds <= MAX_DURATION_S * 1e9 else 0.0


def parse_memory(payload: bytes) -> tuple[AllocatorMemory, Mapping[str, int]] | None:
    """Return memory now and counts since the process began; None if the payload is too short."""
    if len(payload) < protocol.MEMORY.size:
        return None
    allocated, reserved, peak, retries, errors, inactive = protocol.MEMORY.unpack_from(payload)
    counts = _counts(allocation_retries=retries, out_of_memory_errors=errors)
    now = AllocatorMemory(_known(allocated), _known(reserved), _known(peak), _known(inactive))
    return now, counts


def memory_detail(now: AllocatorMemory, counts: Mapping[str, int]) -> Mapping[str, int]:
    """Return the known values as the detail of the event ``memory``."""
    known = {f"{name}_bytes": size for name, size in now._asdict().items() if size is not None}
    return known | dict(counts)


def parse_gc(payload: bytes) -> Mapping[str, int]:
    """Return the counts of Python's garbage collector since the process began."""
    if len(payload) < protocol.GC.size:
        return _NO_COUNTS
    ns, collections, _ = protocol.GC.unpack_from(payload)
    return _counts(gc_ns=ns, gc_collections=collections)


def _phases(raw: bytes, names: Sequence[str]) -> dict[str, float]:
    words = memoryview(raw[: len(raw) // 8 * 8]).cast("Q")
    phases_s: dict[str, float] = {}
    for name, ns in zip(names, words, strict=False):
        if 0 < ns <= MAX_DURATION_S * 1e9:
            # Several may have the name of the other phases.
            phases_s[name] = phases_s.get(name, 0.0) + ns / 1e9
    return phases_s


def _counts(**values: int) -> Mapping[str, int]:
    return {name: value for name, value in values.items() if value <= MAX_INTEGER}


def _count(value: int) -> int:
    return value if value <= MAX_INTEGER else 0


def _known(value: int) -> int | None:
    """Return the value, or None if it is too large, as ABSENT is."""
    return value if value <= MAX_INTEGER else None
