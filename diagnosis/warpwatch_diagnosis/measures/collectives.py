"""The collectives of one rank one by one, so that ranks can be compared with each other."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from warpwatch_diagnosis.measures.intervals import Interval
from warpwatch_diagnosis.trace.events import TraceEvent

# More than any capture of some steps holds; bounds what is kept of a hostile trace.
MAX_COLLECTIVES = 50_000
_MAX_NAME = 200
ALL_TO_ALL = re.compile(r"all_?to_?all", re.IGNORECASE)
# NCCL's kernel of sends and receives, of which an all-to-all consists, too.
_SEND_RECEIVE = re.compile("SendRecv", re.IGNORECASE)
# Host events of all-to-alls that lie around one launch, and of other threads besides.
MAX_NESTED = 16
# As process groups and operators name them, without "c10::" and in lower case.
_ITEM_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "float16": 2, "int": 4, "long": 8,
    "long int": 8, "char": 1, "signed char": 1, "unsigned char": 1, "byte": 1, "bool": 1,
    "short": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex<float>": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective kernel that began or was launched in the window; µs of this rank's clock.

    name: of the collective (``allreduce``), else of the kernel. is_named: the trace says of which
    collective the kernel is, or its own name does. process_group, sequence, bytes
    (the larger of what goes in and out of this rank) and group_size: None where the trace does not
    say. launched_us: begin of the launch call.
    """

    name: str
    begin_us: float
    end_us: float
    launched_us: float | None
    process_group: str | None
    sequence: int | None
    bytes: int | None
    group_size: int | None
    is_named: bool = True


def exchanges(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Return what of the host's operators and annotations is an all-to-all, by begin."""
    known: dict[str, bool] = {}
    found = []
    for event in events:
        if event.name not in known:
            known[event.name] = ALL_TO_ALL.search(event.name) is not None
        if known[event.name]:
            found.append(event)
    return sorted(found, key=attrgetter("begin_us"))


def collectives(
    kernels: Sequence[TraceEvent],
    calls: Mapping[int | None, TraceEvent],
    window: Interval,
    exchanges: Sequence[TraceEvent] = (),
) -> tuple[Collective, ...]:
    """``kernels``: all collective kernels; ``calls``: runtime calls by correlation. In order.

    exchanges: the host's all-to-alls, which give their name to the kernels that they launch.

    A host that is ahead launches in the window what its device begins later; a peer that is less
    late may have begun it in time, so these count as well.
    """
    low, high = window
    found = [(k, calls.get(k.correlation)) for k in kernels]
    mine = [
        (kernel, call)
        for kernel, call in found
        if low <= kernel.begin_us < high or (call is not None and low <= call.begin_us < high)
    ]
    mine.sort(key=lambda pair: (pair[0].begin_us, pair[0].end_us, pair[0].thread))
    return tuple(_collective(kernel, call, exchanges) for kernel, call in mine[:MAX_COLLECTIVES])


def _collective(
    kernel: TraceEvent, call: TraceEvent | None, exchanges: Sequence[TraceEvent]
) -> Collective:
    given = kernel.arguments or {}
    name, group = given.get("Collective name"), given.get("Process Group Name")
    if not isinstance(name, str) or not name:
        sends = _SEND_RECEIVE.search(kernel.name) is not None
        name = "all_to_all" if sends and _is_within(call, exchanges) else ""
    is_named = bool(name) or _SEND_RECEIVE.search(kernel.name) is None
    return Collective(
        is_named=is_named,
        name=(name or kernel.name)[:_MAX_NAME],
        begin_us=kernel.begin_us,
        end_us=kernel.end_us,
        launched_us=call.begin_us if call is not None else None,
        process_group=str(group)[:_MAX_NAME] if isinstance(group, str | int) else None,
        sequence=kernel.whole("Seq"),
        bytes=_bytes(kernel),
        group_size=kernel.whole("Group size"),
    )


def _is_within(call: TraceEvent | None, exchanges: Sequence[TraceEvent]) -> bool:
    """Whether one of the host's all-to-alls launches it, in the same thread."""
    if call is None:
        return False
    last = bisect_right(exchanges, call.begin_us, key=attrgetter("begin_us"))
    # Annotation, operator and its parts lie inside of each other.
    return any(
        event.thread == call.thread and call.begin_us < event.end_us
        for event in exchanges[max(0, last - MAX_NESTED) : last]
    )


def _bytes(kernel: TraceEvent) -> int | None:
    elements = [n for key in ("In msg nelems", "Out msg nelems") if (n := kernel.whole(key))]
    item = item_bytes((kernel.arguments or {}).get("dtype"))
    return max(elements) * item if elements and item else None


def item_bytes(dtype: object) -> int | None:
    """None for a type that is not known."""
    return _ITEM_BYTES.get(str(dtype).lower().removeprefix("c10::"))
