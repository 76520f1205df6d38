"""An anomaly with the minutes around it; test_shown.py has the golden answers and page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.daemon.http.conftest import ENDED, NOW, STRAGGLER, around_straggler
from tests.daemon.http.everything import fill
from warpwatch_daemon.http.page.findings import MAX_DRAWN
from warpwatch_daemon.http.page.minutes import plots
from warpwatch_telemetry.anomalies import AnomalyContext, ContextSeries


def test_what_is_no_longer_in_memory_comes_from_the_history(client, agent):
    old = replace(ENDED, id="old")
    assert client.get("/api/v1/anomalies/a3").json()["context"] is None
    agent.stored = {"old": (old, around_straggler()), "a3": (ENDED, around_straggler())}
    assert client.get("/api/v1/anomalies/old").json()["context"]["interval_s"] == 10
    # The state knows this one, and the history what was around it.
    known = client.get("/api/v1/anomalies/a3").json()
    assert (known["id"], known["context"]["interval_s"]) == ("a3", 10)


def test_detectors_are_filtered(client, agent):
    fill(agent)
    ours = client.get("/api/v1/detectors?job=llama-7b&kind=data_stall").json()
    assert [len(one["readings"]) for one in ours["detectors"]] == [1]
    other = client.get("/api/v1/detectors?job=other&kind=data_stall").json()
    assert other == {"detectors": [{"kind": "data_stall", "readings": []}], "suppressed": []}


def series(times: list[int], values: list[float | None]) -> ContextSeries:
    moments = tuple(NOW + time for time in times)
    durations = {"step_duration_s": tuple(values)}
    return ContextSeries(moments, (1,) * len(times), durations, job="llama-7b")


def test_a_drawing_has_gaps_where_no_step_ended():
    one = series([-50, -40, -30, 20, 30], [1.0, 1.0, 1.0, 2.0, 2.0])
    (plot,) = plots(replace(STRAGGLER, time=NOW, kind="hang"), AnomalyContext(10.0, (one,)))
    assert [len(line.split()) for line in plot.lines] == [3, 2]
    assert (plot.before, plot.since) == ("1 s", "2 s")
    assert plot.begin_x == pytest.approx(240 * 50 / 90, abs=0.1)
    assert plot.label == "step time: before 1 s, since 2 s"


@pytest.mark.parametrize(
    "values", [[], [1.0], [None, None, None], [float("nan"), float("inf"), 1.0], [0.0, 0.0, 0.0]]
)
def test_what_cannot_be_drawn_is_left_out_and_breaks_nothing(client, agent, values):
    strange = AnomalyContext(10.0, (series(list(range(len(values))), values),))
    agent.now = replace(agent.now, contexts={"a7": strange})
    for path in ("/", "/api/v1/anomalies/a7"):
        assert client.get(path).status_code == 200


def test_many_anomalies_are_listed_and_a_few_are_drawn(client, agent):
    many = tuple(replace(STRAGGLER, id=f"b{number}") for number in range(40))
    contexts = {anomaly.id: around_straggler() for anomaly in many}
    agent.now = replace(agent.now, anomalies=many, contexts=contexts)
    page = client.get("/").text
    assert page.count('class="minutes"') == MAX_DRAWN
    assert len(page) < 200_000
