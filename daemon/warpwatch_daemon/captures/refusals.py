"""Which refusals were counted already: what asks again and again is counted and logged once."""

from __future__ import annotations

from collections import OrderedDict

from warpwatch_telemetry.captures import CaptureRequest

# Alertmanager sends a firing alert again for hours, and again within seconds where it is refused.
ALERT_REPEAT_S = 60.0
MAX_REMEMBERED = 1000


class Refusals:
    """A person's request counts each time, an anomaly's when the reason is not the last one.

    An alert's, known by job and kind, counts once in ALERT_REPEAT_S too. ``at`` is monotonic.
    """

    def __init__(self) -> None:
        # The last reason, and when it was counted.
        self._last: OrderedDict[tuple[str, ...], tuple[str, float]] = OrderedDict()

    def is_new(self, request: CaptureRequest, reason: str, at: float) -> bool:
        """Whether this refusal is to be counted, which it then is."""
        key = _key(request)
        if key is None:
            return True
        last, counted_at = self._last.pop(key, ("", at))
        lasts = request.trigger == "anomaly" or at - counted_at < ALERT_REPEAT_S
        is_known = reason == last and lasts
        self._last[key] = (reason, counted_at if is_known else at)
        if len(self._last) > MAX_REMEMBERED:
            self._last.popitem(last=False)
        return not is_known

    def forget(self, request: CaptureRequest) -> None:
        """It was captured: the next refusal is a new one."""
        key = _key(request)
        if key is not None:
            self._last.pop(key, None)


def _key(request: CaptureRequest) -> tuple[str, ...] | None:
    if request.anomaly_id is not None:
        return (request.anomaly_id,)
    if request.trigger == "alert":
        return (*request.job_id, request.anomaly_kind or request.kind)
    return None
