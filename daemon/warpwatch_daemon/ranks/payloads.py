"""The payloads of records, decoded and bounded. Unknown is absent: None, or no such key.

A number that no record of the telemetry holds is not known either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from warpwatch import protocol
from warpwatch_daemon.ranks.claims import MAX_DURATION_S
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import MAX_INTEGER, Step

_NO_COUNTS: Mapping[str, int] = {}


class AllocatorMemory(NamedTuple):
    """What the allocator of a process says, in bytes.

    inactive_split: free pieces of blocks that are partly in use.
    """

    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    inactive_split: int | None = None


def step(
    record: protocol.RecordHead, time: float, job: JobId, rank: int, phases: Sequence[str]
) -> Step:
    """Raises ProtocolError("bad_record") for what is no step."""
    payload = record.payload
    if len(payload) < protocol.STEP.size:
        raise protocol.ProtocolError("bad_record", "a step record is too short")
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
        _phases(payload[protocol.STEP.size :], phases),
        _known(allocated),
        _known(samples) or 0,
        _known(tokens) or 0,
        bool(record.flags & protocol.FLAG_PROFILED),
        job.owner,
        job.run,
    )


def memory(payload: bytes) -> tuple[AllocatorMemory, Mapping[str, int]] | None:
    """Memory now, and what was counted since the process began; None when it is too short."""
    if len(payload) < protocol.MEMORY.size:
        return None
    allocated, reserved, peak, retries, errors, inactive = protocol.MEMORY.unpack_from(payload)
    counts = _counts(allocation_retries=retries, out_of_memory_errors=errors)
    now = AllocatorMemory(_known(allocated), _known(reserved), _known(peak), _known(inactive))
    return now, counts


def memory_detail(now: AllocatorMemory, counts: Mapping[str, int]) -> Mapping[str, int]:
    """What is known of it, as the event ``memory`` has it."""
    known = {f"{name}_bytes": size for name, size in now._asdict().items() if size is not None}
    return known | dict(counts)


def gc(payload: bytes) -> Mapping[str, int]:
    """What Python's garbage collector took since the process began."""
    if len(payload) < protocol.GC.size:
        return _NO_COUNTS
    ns, collections, _ = protocol.GC.unpack_from(payload)
    return _counts(gc_ns=ns, gc_collections=collections)


def _phases(raw: bytes, names: Sequence[str]) -> dict[str, float]:
    words = memoryview(raw[: len(raw) // 8 * 8]).cast("Q")
    phases_s: dict[str, float] = {}
    for name, ns in zip(names, words, strict=False):
        if 0 < ns <= MAX_DURATION_S * 1e9:
            # Several may go by the name of the other phases.
            phases_s[name] = phases_s.get(name, 0.0) + ns / 1e9
    return phases_s


def _counts(**values: int) -> Mapping[str, int]:
    return {name: value for name, value in values.items() if value <= MAX_INTEGER}


def _known(value: int) -> int | None:
    """ABSENT is such a number, too."""
    return value if value <= MAX_INTEGER else None
