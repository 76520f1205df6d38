"""An anomaly with the minutes around it, and how the detectors see what they judge."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.daemon.http.conftest import ENDED, NOW, STRAGGLER, around_straggler
from warpwatch_daemon.http.page.findings import MAX_DRAWN
from warpwatch_daemon.http.page.minutes import plots
from warpwatch_detection.anomalies.register_state import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_telemetry.anomalies import AnomalyContext, ContextSeries, Found


def test_an_anomaly_comes_with_the_minutes_around_it(client):
    anomaly = client.get("/api/v1/anomalies/a7").json()
    assert anomaly["summary"] == "rank 1 computes 60 % longer than its peer since step 400"
    assert (anomaly["explained_by"], anomaly["effects"], anomaly["reopened"]) == (None, [], 0)
    assert anomaly["context"]["interval_s"] == 10
    job, rank, device = anomaly["context"]["series"]
    assert (job["job"], job["rank"], rank["rank"], device["rank"]) == ("llama-7b", None, 1, None)
    assert device["device"] == anomaly["device"]
    assert len(rank["times"]) == len(rank["counts"]) == len(rank["values"]["step_duration_s"])
    assert "phase_s{phase=comm}" in rank["values"]


def test_the_worst_moment_of_an_anomaly_is_told(client):
    ended = client.get("/api/v1/anomalies/a3").json()
    assert (ended["worst"]["step"], ended["worst"]["value"]) == (180, 0.39)
    assert ended["worst"]["summary"] == ended["summary"]


def test_what_is_no_longer_in_memory_comes_from_the_history(client, agent):
    old = replace(ENDED, id="old")
    agent.stored = {"old": (old, around_straggler()), "a3": (ENDED, around_straggler())}
    assert client.get("/api/v1/anomalies/old").json()["context"]["interval_s"] == 10
    # The state knows this one, and the history what was around it.
    known = client.get("/api/v1/anomalies/a3").json()
    assert (known["id"], known["context"]["interval_s"]) == ("a3", 10)


def test_an_anomaly_without_metrics_has_none(client):
    assert client.get("/api/v1/anomalies/a3").json()["context"] is None


def test_an_unknown_anomaly_is_not_found_and_a_parameter_is_refused(client):
    answer = client.get("/api/v1/anomalies/never")
    assert (answer.status_code, answer.json()["error"]["reason"]) == (404, "not_found")
    assert client.get("/api/v1/anomalies/a7?job=x").status_code == 400


def test_detectors_say_why_and_what_something_else_explains(client, agent):
    status = DetectorStatus("fine", "12 % of 30 %", job="llama-7b", rank=1, value=0.12, limit=0.3)
    found = Found(NOW, "warning", "25 % slower", job="llama-7b")
    suppressed = Suppressed("step_regression", found, "straggler", "a7", since=NOW)
    agent.seen = ({"data_stall": [status], "hang": []}, (suppressed,))
    answer = client.get("/api/v1/detectors").json()
    assert [one["kind"] for one in answer["detectors"]] == ["data_stall", "hang"]
    reading = answer["detectors"][0]["readings"][0]
    assert (reading["answer"], reading["text"], reading["limit"]) == ("fine", "12 % of 30 %", 0.3)
    assert answer["suppressed"][0]["cause_id"] == "a7"
    other = client.get("/api/v1/detectors?job=other&kind=data_stall").json()
    assert other == {"detectors": [{"kind": "data_stall", "readings": []}], "suppressed": []}
    assert client.get("/api/v1/detectors?rank=1").status_code == 400


def test_a_detector_that_noise_blinds_says_so(agent, client):
    text = "rank 1 computes 1.01 times as long as its peers, limit 1.9"
    status = DetectorStatus("fine", text, job="llama-7b", rank=1, sees=0.9, effect=0.2)
    agent.seen = ({"straggler": [status]}, ())
    (reading,) = client.get("/api/v1/detectors").json()["detectors"][0]["readings"]
    assert (reading["blind"], reading["sees"], reading["effect"]) == (True, 0.9, 0.2)
    assert reading["text"] == f"{text}; blind to 20%, it sees 90% and more"


# --- on the page ---


def test_the_page_draws_what_the_kind_changes_first_before_and_since(client):
    page = client.get("/").text
    (drawn,) = re.findall(r'<ul class="minutes".*?</ul>', page, re.DOTALL)
    titles = re.findall(r'minutes-title"><span class="quiet">([^<]*)<', drawn)
    assert titles == ["own work", "step time", "throughput", "SM clock"]
    assert drawn.count('<line class="mark"') == 4
    # The rank beside its job, where both are known.
    assert drawn.count('class="peers"') == 2
    assert re.search(r"18\d ms → <strong>33\d ms</strong>", drawn)


def series(times: list[int], values: list[float | None], **about: object) -> ContextSeries:
    return ContextSeries(
        times=tuple(NOW + time for time in times),
        counts=(1,) * len(times),
        values={"step_duration_s": tuple(values)},
        **about,  # type: ignore[arg-type]
    )


def test_a_drawing_has_gaps_where_no_step_ended():
    one = series([-50, -40, -30, 20, 30], [1.0, 1.0, 1.0, 2.0, 2.0], job="llama-7b")
    (plot,) = plots(replace(STRAGGLER, time=NOW, kind="hang"), AnomalyContext(10.0, (one,)))
    assert [len(line.split()) for line in plot.lines] == [3, 2]
    assert (plot.before, plot.since) == ("1 s", "2 s")
    assert plot.begin_x == pytest.approx(240 * 50 / 90, abs=0.1)
    assert plot.label == "step time: before 1 s, since 2 s"


@pytest.mark.parametrize(
    "values", [[], [1.0], [None, None, None], [float("nan"), float("inf"), 1.0], [0.0, 0.0, 0.0]]
)
def test_what_cannot_be_drawn_is_left_out_and_breaks_nothing(client, agent, values):
    strange = AnomalyContext(10.0, (series(list(range(len(values))), values, job="llama-7b"),))
    agent.now = replace(agent.now, contexts={"a7": strange})
    assert client.get("/").status_code == 200
    assert client.get("/api/v1/anomalies/a7").status_code == 200


def test_many_anomalies_are_listed_and_a_few_are_drawn(client, agent):
    many = tuple(replace(STRAGGLER, id=f"b{number}") for number in range(40))
    contexts = {anomaly.id: around_straggler() for anomaly in many}
    agent.now = replace(agent.now, anomalies=many, contexts=contexts)
    page = client.get("/").text
    assert page.count('class="minutes"') == MAX_DRAWN
    assert len(page) < 200_000


def test_the_page_says_what_came_back_and_what_was_explained(client, agent):
    back = replace(STRAGGLER, reopened=2)
    explained = replace(ENDED, explained_by="a7")
    forgotten = replace(ENDED, id="a4", explained_by="a0")
    agent.now = replace(agent.now, anomalies=(back, explained, forgotten))
    page = client.get("/").text
    assert "found 41 s ago, came back 2 times" in page
    assert "explained by straggler, 10 min ago" in page
    assert "explained by another anomaly, 10 min ago" in page
    assert "since step 120 · worst at step 180" in page
