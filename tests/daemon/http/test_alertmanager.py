"""Alertmanager's webhook: what becomes of each alert."""

import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases import cases
from tests.daemon.http.alert_node import BEGAN, WEBHOOK, AlertNode, alert, notification, send
from tests.daemon.http.conftest import STRAGGLER, local_client, servers
from warpwatch_capturing.config import TriggersConfig
from warpwatch_daemon.state.hub import Hub
from warpwatch_telemetry.alerts import ALERT_OUTCOMES
from warpwatch_telemetry.captures import Decision

CASES = cases(__file__)


@pytest.fixture(scope="module")
def shared():
    node = AlertNode(Path())
    with servers(node) as serve, local_client(serve()) as client:
        yield node, client


@pytest.fixture
def site(shared, tmp_path):
    node, client = shared
    with ExitStack() as stack:

        def start(**triggers):
            node.begin(tmp_path, stack, **triggers)
            return node, client

        yield start


def test_an_alert_asks_for_a_capture_of_the_rank_that_it_names(site):
    node, client = site()
    (answer,) = send(client, alert(training_job="train", rank="1"))
    (capture,) = node.captures()
    captured = {"fingerprint": "f1", "outcome": "captured", "detail": ""}
    assert answer == captured | {"capture_id": capture.id}
    assert capture.request.trigger == "alert"
    assert (capture.request.kind, capture.request.ranks) == ("torch", (1,))
    assert [rank.rank for rank in capture.ranks] == [1]
    assert capture.request.reason == "alert WarpwatchStraggler"
    assert capture.request.alerts == (f"f1@{BEGAN}",)
    assert 'warpwatch_alerts_received_total{outcome="captured"} 1' in client.get("/metrics").text


def test_what_cannot_be_captured_is_answered_too(site, golden):
    node, client = site()
    # As a reload does it.
    node.node.service.policy.config = TriggersConfig(recipes={"hang": None})
    answers = send(
        client,
        {**alert("f1", training_job="train"), "status": "resolved"},
        alert("f2", instance="gpu-17:9400"),
        alert("f3", training_job="train", rank="one"),
        alert("f4", training_job="train", capture="video"),
        alert("f5", training_job="other"),
        alert("f6", training_job="train", rank="7"),
        alert("f7", gpu="0"),
        alert("f8", uuid="GPU-9", kind="xid"),
        alert("f9", training_job="train", kind="hang"),
    )
    golden("http/alerts.json", json.dumps(answers, indent=1).encode())
    assert node.captures() == []
    assert {answer["outcome"] for answer in answers} <= set(ALERT_OUTCOMES)


def test_the_same_firing_is_captured_once_however_often_it_is_sent(site):
    node, client = site(cooldown_s=0)
    again = alert(training_job="train", rank="1")
    (first,) = send(client, again)
    (second,) = send(client, again)
    node.restart()
    (third,) = send(client, again)
    assert [one["outcome"] for one in (second, third)] == ["duplicate", "duplicate"]
    assert second["capture_id"] == third["capture_id"] == first["capture_id"]
    assert len(node.captures()) == 1
    # It is remembered for five days after it was sent last.
    for later_s, is_known in ((4 * 86400, True), (5 * 86400, True), (5 * 86400 + 1, False)):
        node.clock.advance(later_s)
        (answer,) = send(client, again)
        assert (answer["outcome"] == "duplicate") == is_known
        node.restart()
    # It was over, and fires again.
    (fourth,) = send(client, {**again, "startsAt": "2026-11-21T23:00:00Z"})
    assert fourth["outcome"] in ("captured", "refused_busy")


def test_the_policy_of_automatic_captures_holds(site):
    node, client = site()
    send(client, alert("f1", training_job="train", kind="straggler", rank="1"))
    assert node.captures()[0].request.ranks == (0, 1)
    for _ in range(3):
        (answer,) = send(client, alert("f2", training_job="train", kind="straggler", rank="3"))
        assert answer["outcome"] == "refused_cooldown"
        assert "triggers.cooldown_s leaves" in answer["detail"]
        assert answer["capture_id"] is None
    assert node.counted("refused_cooldown") == 3
    # Once among the captures: a repeated notification changes nothing.
    assert node.node.counted("refused_cooldown", trigger="alert") == 1


def test_what_was_refused_is_asked_for_again_with_the_next_notification(site):
    node, client = site(quiet_hours=("00:00-24:00",))
    again = alert(training_job="train")
    assert send(client, again)[0]["outcome"] == "refused_quiet_hours"
    policy = node.node.service.policy
    policy.config = policy.config.model_copy(update={"quiet_hours": ()})
    # The store has no space for it.
    store = node.node.store.path
    store.rename(store.with_name("away"))
    assert send(client, again)[0]["outcome"] == "captured"
    node.node.service.finish()
    assert node.captures()[0].outcome == "refused_disk"
    store.with_name("away").rename(store)
    (answer,) = send(client, again)
    assert (answer["outcome"], answer["capture_id"]) == ("captured", node.captures()[1].id)


ANOMALY = replace(STRAGGLER, job="train", end_time=None)


@pytest.mark.parametrize(("changes", "outcome"), CASES["anomalies"])
def test_an_anomaly_that_was_captured_is_not_captured_for_its_alert(site, changes, outcome):
    node, client = site()
    (job,) = {rank.job for rank in node.node.source.live()}
    anomaly = replace(ANOMALY, **{"owner": job.owner, "run": job.run, **changes})
    node.node.hub.publish(anomalies=(anomaly,))
    node.node.hub.publish(decisions=(Decision(1.0, "a7", "captured", "", "20261121T200001-aa"),))
    (answer,) = send(client, alert(training_job="train", kind="straggler", rank="1"))
    assert answer["outcome"] == outcome
    if outcome == "already_captured":
        assert answer["capture_id"] == "20261121T200001-aa"
        assert node.captures() == []
    else:
        assert node.captures()[0].request.ranks == (0, 1)


def test_grafanas_webhook_and_alerts_without_a_fingerprint_are_taken(site):
    _, client = site(cooldown_s=0)
    more = {"silenceURL": "https://grafana.example", "values": {"B": 44.2}, "orgId": 1}
    body = notification({**alert(training_job="train", rank="0"), **more})
    body |= {"title": "[FIRING:1]", "state": "alerting", "message": "…", "orgId": 1, "version": "1"}
    del body["alerts"][0]["fingerprint"]
    (first,) = client.post(WEBHOOK, json=body).json()["alerts"]
    assert (first["outcome"], len(first["fingerprint"])) == ("captured", 16)
    assert client.post(WEBHOOK, json=body).json()["alerts"][0]["outcome"] == "duplicate"


def test_so_many_alerts_of_one_webhook_are_looked_at_and_a_thousand_answered(site):
    node, client = site()
    flood = [alert(f"f{i}", training_job=f"train-{i}") for i in range(1199)]
    body = notification(alert("a", training_job="train"), *flood)
    answer = client.post(WEBHOOK, json=body).json()
    expected = {"captured": 1, "no_rank": 99, "too_many": 900}
    assert Counter(one["outcome"] for one in answer["alerts"]) == expected
    assert answer["alerts"][0]["outcome"] == "captured"
    assert answer["unlisted"] == 200
    counts = {outcome: node.counted(outcome) for outcome in expected}
    assert counts == expected | {"too_many": 1100}


def test_what_was_captured_before_takes_no_place_of_what_is_new(site):
    _, client = site()
    known = [alert(f"f{i}", training_job="train") for i in range(100)]
    assert {answer["outcome"] for answer in send(client, *known)} == {"captured"}
    answers = send(client, *known, alert("new", training_job="other"))
    assert [answer["outcome"] for answer in answers] == [*100 * ["duplicate"], "no_rank"]


def test_before_the_ranks_were_looked_for_alertmanager_is_to_ask_again(site):
    node, client = site()
    # As at the start of a daemon.
    hub = Hub(10.0)
    node.requests = node.open_requests(hub)
    firing = notification(alert(training_job="train", rank="1"))
    answer = client.post(WEBHOOK, json=firing)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "starting")
    assert answer.headers["retry-after"] == "1"
    hub.follow_ranks({})
    assert client.post(WEBHOOK, json=firing).json()["alerts"][0]["outcome"] == "no_rank"
