"""Requests in flight and no progress: the memory of `hang` for inference servers.

An idle server makes no progress either, so only the time with requests in flight counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_detection.detector import NEVER
from warpwatch_telemetry.records import End, RankEvent, Serve, Step

# The limits: a prompt that is computed whole, and a first request that compiles, take no longer.
TIMEOUT_S, FIRST_TIMEOUT_S = 60.0, 600.0
# A process with this reason of silence may be in a long call in C, such as a checkpoint.
HOLDS_GIL = "holds the GIL"
# With a process that does not respond, the time without progress that is not chance.
STOPPED_TIMEOUT_S = 10.0
# A pause may take a little longer than the longest so far.
GAP_FACTOR = 1.15
# For this time, survivors that wait for a dead rank are not a hang: the crash is their cause.
CRASH_QUIET_S = 600.0


@dataclass(slots=True)
class ServerProgress:
    """The progress of one server.

    requests: by process, those in flight in its newest second. progress_time: of the newest
    iteration or token, or when requests came. longest_gap_s: with requests and without progress,
    in health. silent: processes that do not respond. quiet_until: what was before is excused.
    """

    requests: dict[int, int] = field(default_factory=dict)
    progress_time: float = -NEVER
    begun: bool = False
    longest_gap_s: float = 0.0
    silent: set[int] = field(default_factory=set)
    quiet_until: float = -NEVER
    hung: bool = False

    @property
    def in_flight(self) -> int:
        return sum(self.requests.values())

    @property
    def due(self) -> float:
        """The time when the server counts as hung if no more records arrive."""
        if self.hung or not self.in_flight:
            return NEVER
        limit_s = max(TIMEOUT_S if self.begun else FIRST_TIMEOUT_S, GAP_FACTOR * self.longest_gap_s)
        if self.silent:
            limit_s = STOPPED_TIMEOUT_S
        return max(self.progress_time, self.quiet_until) + limit_s

    def _serve(self, seen: Serve) -> bool:
        before, requests = self.in_flight, seen.running + seen.waiting
        if requests or seen.rank in self.requests:
            self.requests[seen.rank] = requests
        self.silent.discard(seen.rank)
        if seen.generated_tokens or any(count for count, _ in seen.iterations.values()):
            return self._go_on(seen.time)
        if not before:
            self.progress_time = max(self.progress_time, seen.time)
        return not self.in_flight and self._end()

    def observe(self, seen: Serve | Step | RankEvent | End) -> bool:
        """Add a record of a process; return whether it ends the hang."""
        if isinstance(seen, Serve):
            return self._serve(seen)
        if isinstance(seen, Step):
            return self._go_on(seen.time)
        if isinstance(seen, End):
            return seen.rank is not None and self._leave(seen.rank)
        if seen.event == "stopped" and seen.detail.get("silent_reason") != HOLDS_GIL:
            self.silent.add(seen.rank)
        elif seen.event == "resumed":
            self.silent.discard(seen.rank)
        elif seen.event in ("died", "exception"):
            self.excuse(seen.time + CRASH_QUIET_S)
        return seen.event == "died" and self._leave(seen.rank)

    def _leave(self, rank: int) -> bool:
        self.requests.pop(rank, None)
        self.silent.discard(rank)
        return not self.in_flight and self._end()

    def excuse(self, until: float) -> None:
        self.quiet_until = max(self.quiet_until, until)

    @property
    def culprit(self) -> int | None:
        return min(self.silent) if len(self.silent) == 1 else None

    def sentence(self, now: float) -> str:
        count = self.in_flight
        who = f"{count:,} request{' is' if count == 1 else 's are'} in flight"
        why = ""
        if self.culprit is not None:
            why = f", the process of rank {self.culprit} does not respond"
        return f"{who} and nothing has moved for {now - self.progress_time:.0f} s{why}"

    def _go_on(self, now: float) -> bool:
        usual = self.begun and self.in_flight and not self.hung
        if usual and self.progress_time > self.quiet_until:
            self.longest_gap_s = max(self.longest_gap_s, now - self.progress_time)
        self.progress_time, self.begun = max(self.progress_time, now), True
        return self._end()

    def _end(self) -> bool:
        was, self.hung = self.hung, False
        return was
