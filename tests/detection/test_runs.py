"""The figures of runs: sums of steps, comparisons, and the earlier runs of the same kind."""

import random
import statistics
from typing import Any

import msgspec
import pytest

from tests.cases import cases
from tests.detection.streams import EPOCH_S, made
from tests.golden_lines import line
from warpwatch_detection.runs import RunFigures, StepHistogram, compare, compared, earlier
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.records import End, Serve, Step

CASES = cases(__file__)


def summary(fields: dict[str, Any]) -> RunSummary:
    """Return a run of llama; times count from the epoch of the streams."""
    times = {name: EPOCH_S + fields.get(name, 0.0) for name in ("time", "first_time")}
    if fields.get("end_time") is not None:
        times["end_time"] = EPOCH_S + fields["end_time"]
    return msgspec.convert({"owner": "", "job": "llama", "run": "", **fields, **times}, RunSummary)


@pytest.mark.parametrize("name", CASES["figures"])
def test_the_figures_of_a_run_are_those_of_its_steps(name, golden_case):
    figures = RunFigures(*map(summary, CASES["figures"][name].get("before", ())))
    for record in made(CASES["figures"][name]["records"]):
        if isinstance(record, Step):
            figures.add(record)
        elif isinstance(record, Serve):
            figures.add_second(record)
        elif isinstance(record, End):
            figures.note_end(record.time)
    about = {"end_time": figures.end_time, "energy_before_j": figures.energy_before_j}
    golden_case(line("figures", figures.fields(2) | about))


@pytest.mark.parametrize("name", CASES["compared"])
def test_two_runs_are_compared(name, golden_case):
    golden_case(line("compared", compare(*map(summary, CASES["compared"][name]))))


@pytest.mark.parametrize("name", CASES["earlier"])
def test_earlier_runs_are_the_last_good_ones_of_the_kind(name, golden_case):
    run, *others = map(summary, CASES["earlier"][name]["runs"])
    found = earlier(run, others)
    assert [one.run for one in found] == CASES["earlier"][name]["found"]
    golden_case(line("compared", compared(run, found)))


def test_percentiles_are_right_to_one_percent_however_steps_are_spread():
    source = random.Random(0)
    for spread in (0.01, 1.0):
        histogram = StepHistogram()
        steps_s = [source.lognormvariate(-1, spread) for _ in range(5_000)]
        for step_s in steps_s:
            histogram.add(step_s)
        cut = statistics.quantiles(steps_s, n=20)
        assert histogram.percentile(0.5) == pytest.approx(cut[9], rel=0.01)
        assert histogram.percentile(0.95) == pytest.approx(cut[18], rel=0.01)
