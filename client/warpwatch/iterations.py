"""The iterations of an inference server, as steps of its clock, and its counts per second.

An iteration is one pass of the engine: from the end of the one before, or after idle from its own
start, to its results. Idle, with no request in flight, belongs to no iteration.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from threading import get_ident
from time import monotonic_ns
from types import TracebackType
from typing import Any

from warpwatch import faults, protocol
from warpwatch.protocol import ABSENT, BUCKET, LATENCIES, LATENCY_BOUNDS_S, SERVE, SERVE_COUNTS
from warpwatch.ring import RingWriter
from warpwatch.step_times import OTHER, START, SWITCH
from warpwatch.steps import StepClock

WRITE_INTERVAL_NS = 1_000_000_000
# After this time without an iteration, a server that does not report idle time counts as idle.
PRESUMED_IDLE_NS = 1_000_000_000


class ServeCounts:
    """The counts of a serving process since its start; its helper thread writes what they rose.

    Only one thread may change each of them. Unknown values are ``None``.
    sample: returns running, waiting and kv_usage now, in the helper thread.
    exact: whether the server reports when it is idle; otherwise the iterations tell.
    """

    def __init__(self, now_ns: int) -> None:
        self.running: int | None = None
        self.waiting: int | None = None
        self.kv_usage: float | None = None
        self.preemptions = self.prefix_hit_tokens = self.prefix_query_tokens = 0
        self.prompt_tokens = self.generated_tokens = 0
        self.exact = False
        self.sample: Callable[[], tuple[int, int, float | None]] | None = None
        self._counts = {name: [0] * (len(LATENCY_BOUNDS_S) + 1) for name in LATENCIES}
        self._sums_ns = dict.fromkeys(LATENCIES, 0)
        # Since when it is idle, None while it is busy, and the sum before.
        self._idle_since_ns: int | None = now_ns
        self._idle_ns = 0
        self._written_ns = now_ns
        self._written: list[int] = [0] * (1 + len(SERVE_COUNTS) + len(LATENCIES))
        self._buckets = {name: counts[:] for name, counts in self._counts.items()}

    @faults.guarded
    def observe(self, latency: str, seconds: Iterable[float]) -> None:
        """Count latencies: ``first_token``, ``inter_token`` or ``queue``. Never raises.

        Values that are not finite numbers are ignored.
        """
        counts = self._counts[latency]
        for value in seconds:
            try:
                ns = int(value * 1e9)
            except (TypeError, ValueError, OverflowError):
                continue
            counts[bisect_left(LATENCY_BOUNDS_S, value)] += 1
            self._sums_ns[latency] += max(0, ns)

    # --- idle -----------------------------------------------------------------------------------

    def rest(self, now_ns: int) -> None:
        """Note that the server is idle from now on, or may be if it does not report it."""
        if self._idle_since_ns is None:
            self._idle_since_ns = now_ns

    def work(self, now_ns: int, after_idle: bool) -> bool:
        """Note the start of an iteration; return whether it follows idle time.

        Without ``after_idle`` its requests were in flight before.
        """
        since_ns, self._idle_since_ns = self._idle_since_ns, None
        if since_ns is None:
            return False
        idle_ns = now_ns - since_ns
        if not (after_idle or self.exact or idle_ns >= PRESUMED_IDLE_NS):
            return False
        self._idle_ns += idle_ns
        return True

    def _idle_until(self, now_ns: int) -> int:
        since_ns = self._idle_since_ns
        idle_ns = 0 if since_ns is None else max(0, now_ns - since_ns)
        return self._idle_ns + (idle_ns if self.exact or idle_ns >= PRESUMED_IDLE_NS else 0)

    # --- in the helper thread -------------------------------------------------------------------

    def write(self, ring: RingWriter, now_ns: int, force: bool = False) -> None:
        """Write the rise since the last record, about once per second."""
        passed_ns = now_ns - self._written_ns
        if passed_ns < (1 if force else WRITE_INTERVAL_NS):
            return
        self._written_ns = now_ns
        if self.sample is not None:
            try:
                self.running, self.waiting, self.kv_usage = self.sample()
            except Exception as error:
                faults.swallow(error)
        totals = [
            self._idle_until(now_ns), *(int(getattr(self, name)) for name in SERVE_COUNTS),
            *self._sums_ns.values(),
        ]  # fmt: skip
        risen = [max(0, total - before) for total, before in zip(totals, self._written)]
        self._written = [max(pair) for pair in zip(totals, self._written)]
        idle_ns, *others = risen
        usage = None if self.kv_usage is None else round(min(max(self.kv_usage, 0.0), 1.0) * 1e9)
        values = (self.running, self.waiting, usage)
        now = [ABSENT if value is None else int(value) for value in values]
        fixed = SERVE.pack(passed_ns, min(idle_ns, passed_ns), *now, *others)
        entries = list(self._new_buckets())
        while len(entries) > protocol.MAX_BUCKETS:
            more, entries = entries[: protocol.MAX_BUCKETS], entries[protocol.MAX_BUCKETS :]
            empty = bytes(SERVE.size)
            flags = protocol.FLAG_CONTINUES
            ring.append(protocol.RECORD_SERVE, empty + b"".join(more), flags, wait_s=0.05)
        ring.append(protocol.RECORD_SERVE, fixed + b"".join(entries), wait_s=0.05)

    def _new_buckets(self) -> Iterable[bytes]:
        for place, (name, counts) in enumerate(self._counts.items()):
            before, now = self._buckets[name], counts[:]
            self._buckets[name] = now
            for index, (old, new) in enumerate(zip(before, now)):
                if new > old:
                    yield BUCKET.pack(place, index, min(new - old, (1 << 32) - 1))


class IterationClock(StepClock):
    """A step clock whose steps are iterations: idle time before one does not belong to it.

    ``after_idle``: whether the next iteration starts with requests that were not in flight before.
    Time between iterations is the phase ``wait`` if ``waits``, and may be idle. Otherwise the
    server reports when it is idle.
    """

    __slots__ = ("_wait", "after_idle", "serving", "waits")

    def __init__(self) -> None:
        super().__init__()
        self.serving = ServeCounts(monotonic_ns())
        self.after_idle = False
        self.waits = True
        self._wait = OTHER

    def begin(self) -> StepClock:
        if not self.open and self.thread in (0, get_ident()):
            now = monotonic_ns()
            if self.serving.work(now, self.after_idle):
                self.push((START, now, None))
            elif self._wait != OTHER:
                self.push((SWITCH, now, OTHER))
        return super().begin()

    __enter__ = begin

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        was_open = self.open
        super().__exit__(kind, error, trace)
        if self.waits and was_open and not self.open:
            try:
                now = monotonic_ns()
                if self._wait == OTHER:
                    self._wait = self.phase_index("wait")
                self.push((SWITCH, now, self._wait))
                self.serving.rest(now)
            except Exception as fault:
                faults.swallow(fault)
