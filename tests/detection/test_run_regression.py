"""run_regression: a run beside the job's earlier ones, as the daemon says how they compare."""

from typing import Any

import pytest

from tests.cases import cases
from tests.detection.streams import alone
from warpwatch_detection.engine import Detection
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.records import RankEvent, Step

CASES = cases(__file__)
PHASES = {"forward": 0.2, "backward": 0.25, "other": 0.05}


@pytest.fixture
def engine() -> Detection:
    engine = alone("run_regression")
    engine.feed(Step(0.0, "llama", 0, 1, 0.5))
    return engine


def compared(
    engine: Detection, step_s: object, earlier_s: object, time: float = 1.0, **detail: Any
) -> Anomaly | None:
    """The anomaly after the daemon has said so."""
    said = {"steps": 200, "step_s": step_s, "earlier_s": earlier_s, **detail}
    engine.feed(RankEvent(time, "llama", 0, "compared", said))
    return next(iter(engine.active), None)


def test_a_run_slower_than_the_one_before_is_found_with_the_phase_that_grew(engine):
    grown = PHASES | {"forward": 0.3}
    found = compared(engine, 0.6, [0.5], phases_s=grown, earlier_phases_s=PHASES)
    assert (found.kind, found.severity, found.rank) == ("run_regression", "warning", None)
    assert (found.value, found.baseline) == (0.6, 0.5)
    assert found.summary == (
        "steps take 20 % longer than in the run before: 0.6 s instead of 0.5 s, most of it in "
        "forward"
    )


@pytest.mark.parametrize(("step_s", "earlier_s", "is_found"), CASES["limits"])
def test_the_limit_is_the_earlier_runs_own_spread(engine, step_s, earlier_s, is_found):
    assert (compared(engine, step_s, earlier_s) is not None) == is_found


def test_it_is_over_well_below_the_limit_and_few_steps_say_nothing(engine: Detection) -> None:
    assert compared(engine, 0.9, [0.5], steps=99) is None
    for time, step_s, is_found in ((1.0, 0.6, True), (2.0, 0.54, True), (3.0, 0.52, False)):
        assert (compared(engine, step_s, [0.5], time, steps=100) is not None) == is_found


@pytest.mark.parametrize("detail", CASES["none"])
def test_what_is_no_comparison_says_nothing(engine: Detection, detail: dict[str, Any]) -> None:
    assert compared(engine, **({"step_s": 0.9, "earlier_s": None} | detail)) is None
