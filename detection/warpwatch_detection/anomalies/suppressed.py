"""What is found and not raised: an active anomaly explains it. Kept in sight, and counted."""

from __future__ import annotations

from collections import Counter

from warpwatch_detection.anomalies.register_state import Key, Suppressed
from warpwatch_detection.detector import Found
from warpwatch_detection.detectors.causes import FOUND_ONCE
from warpwatch_telemetry.anomalies import EVENT_KINDS, Anomaly

MAX_SUPPRESSED = 1000
# A cause's own blocks may calm down before those of its shadow: what is found so often after the
# cause was over is there by itself. A level that has calmed down is told after two blocks.
FOUND_AFTER_CAUSE = 3


class SuppressedFindings:
    """``known``: by what they are about; the register's state keeps them.

    suppressed: how often a kind was explained by another, the second.
    """

    def __init__(self, known: dict[Key, Suppressed]) -> None:
        self.known = known
        self.suppressed: Counter[tuple[str, str]] = Counter()

    def note(self, key: Key, found: Found, cause: Anomaly) -> None:
        before = self.known.pop(key, None)
        if before is None or before.cause_id != cause.id:
            self.suppressed[key[0], cause.kind] += 1
        self.known[key] = Suppressed(
            kind=key[0],
            job=found.job,
            rank=found.rank,
            device=found.device,
            cause=cause.kind,
            cause_id=cause.id,
            since=found.time if before is None else before.since,
            summary=found.summary,
            time=found.time,
            severity=found.severity,
            step=found.step,
            begin_step=found.begin_step,
            value=found.value,
            baseline=found.baseline,
        )
        if len(self.known) > MAX_SUPPRESSED:
            del self.known[next(iter(self.known))]

    def stands_alone(self, key: Key) -> bool:
        """Whether what is found without a cause is an anomaly: it has outlived the cause."""
        shadow = self.known.get(key)
        if shadow is None:
            return True
        shadow.again += 1
        if shadow.again < FOUND_AFTER_CAUSE:
            return False
        del self.known[key]
        return True

    def bereaved(self, cause: Anomaly, time: float, hold_s: float) -> list[tuple[Key, Found]]:
        """Taken out: what goes on though its cause is over, and is not found a second time.

        hold_s: how long an event lasts. One that an event explained was told with it, and is over.
        """
        alone = []
        for key, shadow in list(self.known.items()):
            if shadow.cause_id != cause.id or key[0] not in FOUND_ONCE:
                continue
            del self.known[key]
            over = cause.kind in EVENT_KINDS or shadow.time + hold_s <= time
            if key[0] not in EVENT_KINDS or not over:
                alone.append((key, _found(shadow, time)))
        return alone

    def forget(self, key: Key) -> None:
        self.known.pop(key, None)

    def forget_job(self, job: str) -> None:
        for key in [key for key in self.known if key[1] == job]:
            del self.known[key]


def _found(shadow: Suppressed, time: float) -> Found:
    return Found(
        time=max(time, shadow.time),
        severity=shadow.severity,
        summary=shadow.summary,
        job=shadow.job,
        rank=shadow.rank,
        device=shadow.device,
        step=shadow.step,
        begin_step=shadow.begin_step,
        value=shadow.value,
        baseline=shadow.baseline,
    )
