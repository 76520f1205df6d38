"""What is found and not raised because an active anomaly explains it: shown, and counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from warpwatch_detection.anomalies.causes import FOUND_ONCE, LONG_EVIDENCE
from warpwatch_detection.anomalies.register_state import Key, Suppressed
from warpwatch_detection.anomalies.worst import recovers
from warpwatch_telemetry.anomalies import EVENT_KINDS, Anomaly, Detected
from warpwatch_telemetry.jobs import JobId

MAX_SUPPRESSED = 1000
# Detectors judge in blocks that end at different times, so an effect may be found once or twice
# more after its cause is over. What is found a third time stands on its own.
FOUND_AFTER_CAUSE = 3


class SuppressedFindings:
    """``known``: by what they are about; the register's state keeps them.

    counts: how often a kind was explained by another, the second.
    """

    def __init__(self, known: dict[Key, Suppressed]) -> None:
        self.known = known
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(self, key: Key, found: Detected, cause: Anomaly) -> None:
        before = self.known.pop(key, None)
        if before is None or before.cause_id != cause.id:
            self.counts[key[0], cause.kind] += 1
        since = found.time if before is None else before.since
        self.known[key] = Suppressed(key[0], found, cause.kind, cause.id, since)
        if len(self.known) > MAX_SUPPRESSED:
            del self.known[next(iter(self.known))]

    def outlives_cause(self, key: Key, found: Detected) -> bool:
        """Whether what is found, with no cause active, is an anomaly of its own.

        Long evidence that fades is of the time of the cause and does not count.
        """
        suppressed = self.known.get(key)
        if suppressed is None:
            return True
        if key[0] in LONG_EVIDENCE and recovers(key[0], found, suppressed.found):
            return False
        suppressed.again += 1
        if suppressed.again < FOUND_AFTER_CAUSE:
            return False
        del self.known[key]
        return True

    def release(self, cause: Anomaly, time: float, hold_s: float) -> list[tuple[Key, Detected]]:
        """Take out what goes on although its cause is over, and will not be found a second time.

        hold_s: how long an event lasts. An event that another event explained was part of it, and
        is over.
        """
        released = []
        for key, suppressed in list(self.known.items()):
            if suppressed.cause_id != cause.id or key[0] not in FOUND_ONCE:
                continue
            del self.known[key]
            found = suppressed.found
            is_over = cause.kind in EVENT_KINDS or found.time + hold_s <= time
            if key[0] not in EVENT_KINDS or not is_over:
                released.append((key, replace(found, time=max(time, found.time))))
        return released

    def forget(self, key: Key) -> None:
        self.known.pop(key, None)

    def forget_job(self, job: JobId) -> None:
        for key in [key for key in self.known if key[1] == job]:
            del self.known[key]
