"""Lists the collectives of one rank, so that ranks can be compared with each other."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from warpwatch_diagnosis.measures.gpu_events import GpuEvents
from warpwatch_diagnosis.trace.events import TraceEvent

# A capture of a few steps has fewer; the limit bounds what a hostile trace can store.
MAX_COLLECTIVES = 50_000
_MAX_NAME = 200
# An all-to-all of NCCL is a kernel of sends and receives, too.
_SEND_RECEIVE = re.compile("SendRecv", re.IGNORECASE)
# At most this many host events of all-to-alls lie around one launch or in other threads.
MAX_NESTED = 16
# The names of process groups and operators, without "c10::" and in lower case.
_ITEM_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "float16": 2, "int": 4, "long": 8,
    "long int": 8, "char": 1, "signed char": 1, "unsigned char": 1, "byte": 1, "bool": 1,
    "short": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex<float>": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective kernel that began or was launched in the window; µs of this rank's clock.

    name: the collective (``allreduce``), else the kernel. is_named: the trace or the kernel's own
    name has the collective. launched_us: begin of the launch call. bytes: the larger of input and
    output of this rank. Fields are None if the trace does not have them.
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


def collectives(work: GpuEvents, names: set[str]) -> tuple[Collective, ...]:
    """Return the kernels of these names that begin or are launched in the window, in order.

    A host that is ahead launches in the window what its device begins later; a peer that is less
    late may begin it in time.
    """
    low, high = work.window
    found = [(k, work.calls.get(k.correlation)) for k in work.kernels if k.name in names]
    mine = [
        (kernel, call)
        for kernel, call in found
        if low <= kernel.begin_us < high or (call is not None and low <= call.begin_us < high)
    ]
    mine.sort(key=lambda pair: (pair[0].begin_us, pair[0].end_us, pair[0].thread))
    return tuple(_collective(*pair, work.exchanges) for pair in mine[:MAX_COLLECTIVES])


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
    """Return whether one of the host's all-to-alls launches it, in the same thread."""
    if call is None:
        return False
    last = bisect_right(exchanges, call.begin_us, key=attrgetter("begin_us"))
    return any(
        event.thread == call.thread and call.begin_us < event.end_us
        for event in exchanges[max(0, last - MAX_NESTED) : last]
    )


def _bytes(kernel: TraceEvent) -> int | None:
    elements = [n for key in ("In msg nelems", "Out msg nelems") if (n := kernel.whole(key))]
    item = item_bytes((kernel.arguments or {}).get("dtype"))
    return max(elements) * item if elements and item else None


def item_bytes(dtype: object) -> int | None:
    """Return the bytes of a type, or None if it is unknown."""
    return _ITEM_BYTES.get(str(dtype).lower().removeprefix("c10::"))
