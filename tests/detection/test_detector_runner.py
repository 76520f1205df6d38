"""One detector that fails costs no other its records and deadlines."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.detection.streams import EPOCH_S, alone
from warpwatch_detection.detector import (
    Detector,
    DetectorResult,
    DetectorRunner,
    DetectorStatus,
    KindResults,
)
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import Clock


@dataclass
class Deadline:
    deadline: float = EPOCH_S + 10


class Watching(Detector):
    """Finds something in every record, and again at its deadline; fails in one of its methods."""

    reads = (Clock,)
    waits = True

    def __init__(self, kind: str, fails: str = "") -> None:
        self.kind = kind
        self.state = Deadline()
        self._fails = fails
        self.asked = 0

    def observe(self, seen: Any) -> Iterable[DetectorResult]:
        self._fail("observe")
        return (Detected(seen.time, "warning", "seen", job="llama"),)

    def expire(self, now: float) -> Iterable[DetectorResult]:
        self.asked += 1
        self._fail("expire")
        self.state.deadline = float("inf")
        return (Detected(now, "warning", "expired", job="llama"),)

    def forget(self, job: JobId) -> None:
        self._fail("forget")

    def statuses(self) -> Iterable[DetectorStatus]:
        return ()

    def _fail(self, method: str) -> None:
        if method == self._fails:
            raise ZeroDivisionError(self.kind)


def summaries(results: KindResults) -> list[tuple[str, str]]:
    return [(kind, one.summary) for kind, one in results if isinstance(one, Detected)]


@pytest.mark.parametrize("method", ["observe", "expire", "forget"])
def test_a_detector_that_fails_blinds_no_other(method: str) -> None:
    failing, other = Watching("hang", fails=method), Watching("crash")
    both = DetectorRunner([failing, other, Watching("xid", fails=method)])
    assert ("crash", "seen") in summaries(both.observe(Clock(EPOCH_S)))
    assert ("crash", "expired") in summaries(both.expire(EPOCH_S + 20, float))
    both.forget(JobId("", "llama", ""))
    assert both.failures == {"hang": 1, "xid": 1}
    assert str(both.pop_failure()) == "hang"
    assert both.pop_failure() is None


def test_a_detector_that_failed_at_a_deadline_is_not_asked_for_it_again() -> None:
    failing = Watching("hang", fails="expire")
    alone = DetectorRunner([failing])
    for second in range(20):
        alone.observe(Clock(EPOCH_S + second))
        if alone.deadline() <= EPOCH_S + second:
            alone.expire(EPOCH_S + second, float)
    assert failing.asked == 1


def test_a_status_has_its_end_once_and_a_blind_rank_makes_its_job_blind(monkeypatch):
    seen: dict[str, Any] = {"job": "llama", "owner": "uid/7", "run": "r1", "effect": 0.2}
    one = DetectorStatus("fine", "text", **seen, sees=0.1, nearest=0.5, nearest_step=0)
    assert one.text == "text; came to 0.50 of its limit at step 0; sees 10% and more"
    assert (replace(one).text, one.job_id) == (one.text, JobId("uid/7", "llama", "r1"))
    engine = alone("hang")
    blind, unknown = replace(one, sees=0.3), replace(one, sees=None, effect=None, blind=True)
    for statuses in ((one, blind), (blind, one), (one, unknown), (replace(one, job=None), unknown)):
        monkeypatch.setattr(engine.runner.detectors[0], "statuses", statuses.__iter__)
        assert [(sight.owner, sight.blind) for sight in engine.sensitivities()] == [("uid/7", True)]
