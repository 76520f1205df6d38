"""Alertmanager's webhook: what becomes of each alert."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.daemon.http.alert_node import BEGAN, WEBHOOK, AlertNode, alert, notification, send
from tests.daemon.http.conftest import local_client, servers
from warpwatch_daemon.captures.alerts.alert_requests import MAX_ALERTS
from warpwatch_daemon.state.hub import Hub
from warpwatch_telemetry.alerts import ALERT_OUTCOMES
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Decision

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def shared():
    """A node and a client of its server, which all tests share that need no own."""
    node = AlertNode(Path())
    with servers(node) as serve, local_client(serve()) as client:
        yield node, client


@pytest.fixture
def site(shared, tmp_path):
    """Begins a node: (the node, a client of it)."""
    with ExitStack() as stack:

        def start(http=None, **triggers):
            node, client = shared
            if http is not None:
                node = AlertNode(tmp_path)
                server = stack.enter_context(servers(node))(**http)
                over_tcp = httpx.Client(base_url=server.url, timeout=30)
                client = over_tcp if "token_file" in http else local_client(server)
                stack.enter_context(client)
            node.begin(tmp_path, stack, **triggers)
            return node, client

        yield start


def test_an_alert_asks_for_a_capture_of_the_rank_that_it_names(site):
    node, client = site()
    (answer,) = send(client, alert(training_job="train", rank="1"))
    (capture,) = node.captures()
    assert answer == {
        "fingerprint": "f1",
        "outcome": "captured",
        "detail": "",
        "capture_id": capture.id,
    }
    assert capture.request.trigger == "alert"
    assert (capture.request.kind, capture.request.ranks) == ("torch", (1,))
    assert capture.request.reason == "alert WarpwatchStraggler"
    assert capture.request.alerts == (f"f1@{BEGAN}",)
    assert 'warpwatch_alerts_received_total{outcome="captured"} 1' in client.get("/metrics").text


def test_an_alert_without_a_rank_is_about_all_of_the_job(site):
    node, client = site()
    send(client, alert(training_job="train"))
    assert [rank.rank for rank in node.captures()[0].ranks] == [0, 1, 2, 3]


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
    # It was over, and fires again.
    (fourth,) = send(client, {**again, "startsAt": "2026-11-21T23:00:00Z"})
    assert fourth["outcome"] in ("captured", "refused_busy")


def test_alerts_of_one_job_and_kind_become_one_capture(site):
    node, client = site()
    answers = send(
        client,
        alert("f1", training_job="train", rank="1"),
        alert("f2", training_job="train", rank="3"),
        alert("f3", training_job="train", rank="1"),
    )
    (capture,) = node.captures()
    assert {answer["capture_id"] for answer in answers} == {capture.id}
    assert capture.request.ranks == (1, 3)
    assert capture.request.alerts == (f"f1@{BEGAN}", f"f2@{BEGAN}", f"f3@{BEGAN}")


@pytest.mark.parametrize(
    ("labels", "kind", "ranks"),
    [
        ({"kind": "straggler", "rank": "1"}, "torch", (0, 1)),
        ({"kind": "hang", "rank": "1"}, "stacks", None),
        ({"kind": "memory_leak", "rank": "2"}, "memory", (2,)),
        ({"kind": "thermal_throttle"}, "torch", None),
        ({"kind": "no_kind_of_ours"}, "torch", None),
        ({"kind": "straggler", "rank": "1", "capture": "stacks"}, "stacks", (1,)),
        ({"kind": "hang", "capture": "torch"}, "torch", None),
    ],
)
def test_the_label_capture_decides_then_the_recipe_of_the_kind(site, labels, kind, ranks):
    node, client = site()
    assert send(client, alert(training_job="train", **labels))[0]["outcome"] == "captured"
    request = node.captures()[0].request
    assert (request.kind, request.ranks) == (kind, ranks)
    known = None if labels["kind"] == "no_kind_of_ours" else labels["kind"]
    assert request.anomaly_kind == known


def test_a_kind_whose_recipe_is_switched_off_is_not_captured(site):
    node, client = site(recipes={"hang": None})
    (answer,) = send(client, alert(training_job="train", kind="hang"))
    assert answer["outcome"] == "no_recipe"
    assert answer["detail"] == "triggers.recipes: hang is switched off"
    assert node.captures() == []


def test_the_policy_of_automatic_captures_holds(site):
    node, client = site()
    send(client, alert("f1", training_job="train", kind="straggler", rank="1"))
    for _ in range(3):
        (answer,) = send(client, alert("f2", training_job="train", kind="straggler", rank="3"))
        assert answer["outcome"] == "refused_cooldown"
        assert "triggers.cooldown_s leaves" in answer["detail"]
        assert answer["capture_id"] is None
    assert node.counted("refused_cooldown") == 3
    # Once among the captures: a repeated notification is no news.
    assert node.node.counted("refused_cooldown", trigger="alert") == 1


def test_what_the_store_had_no_room_for_is_asked_for_again_with_the_next_notification(site):
    node, client = site()
    store = node.node.store.path
    store.rename(store.with_name("away"))
    assert send(client, alert(training_job="train"))[0]["outcome"] == "captured"
    node.node.coordinator.finish()
    assert node.captures()[0].outcome == "refused_disk"
    store.with_name("away").rename(store)
    (again,) = send(client, alert(training_job="train"))
    assert (again["outcome"], again["capture_id"]) == ("captured", node.captures()[1].id)


def test_what_was_refused_is_asked_for_again_with_the_next_notification(site):
    node, client = site(quiet_hours=("00:00-24:00",))
    again = alert(training_job="train")
    assert send(client, again)[0]["outcome"] == "refused_quiet_hours"
    policy = node.node.coordinator.policy
    policy.config = policy.config.model_copy(update={"quiet_hours": ()})
    assert send(client, again)[0]["outcome"] == "captured"


def test_a_dry_run_captures_nothing(site):
    node, client = site(dry_run=True)
    assert send(client, alert(training_job="train"))[0]["outcome"] == "refused_dry_run"
    assert node.captures() == []


def test_an_alert_of_a_device_is_about_the_ranks_on_it(site):
    node, client = site()
    (answer,) = send(client, alert(uuid="GPU-2", gpu="2", kind="thermal_throttle"))
    assert answer["outcome"] == "captured"
    assert node.captures()[0].request.ranks == (2,)
    (unknown,) = send(client, alert("f2", uuid="GPU-9", kind="xid"))
    assert unknown["outcome"] == "no_rank"
    assert unknown["detail"] == "no running rank is known on device GPU-9"


ANOMALY = Anomaly(
    id="a7",
    kind="straggler",
    time=1.0,
    severity="warning",
    summary="rank 1 is slow",
    job="train",
    rank=1,
)


@pytest.mark.parametrize(
    ("anomaly", "outcome"),
    [
        (ANOMALY, "already_captured"),
        (replace(ANOMALY, end_time=2.0), "captured"),
        (replace(ANOMALY, rank=2), "captured"),
        (replace(ANOMALY, kind="data_stall"), "captured"),
        (replace(ANOMALY, job="other"), "captured"),
        (replace(ANOMALY, id="a8"), "captured"),
    ],
)
def test_an_anomaly_that_was_captured_is_not_captured_for_its_alert(site, anomaly, outcome):
    node, client = site()
    (job,) = node.node.source.jobs()
    anomaly = replace(anomaly, owner=job.owner, run=job.run)
    node.node.hub.publish(anomalies=(anomaly,))
    node.node.hub.publish(decisions=(Decision(1.0, "a7", "captured", "", "20261121T200001-aa"),))
    (answer,) = send(client, alert(training_job="train", kind="straggler", rank="1"))
    assert answer["outcome"] == outcome
    if outcome == "already_captured":
        assert answer["capture_id"] == "20261121T200001-aa"
        assert node.captures() == []


def test_what_cannot_be_captured_is_answered_too(site):
    node, client = site()
    answers = send(
        client,
        {**alert("f1", training_job="train"), "status": "resolved"},
        alert("f2", instance="gpu-17:9400"),
        alert("f3", training_job="train", rank="one"),
        alert("f4", training_job="train", capture="video"),
        alert("f5", training_job="other"),
        alert("f6", training_job="train", rank="7"),
        alert("f7", gpu="0"),
    )
    assert [answer["outcome"] for answer in answers] == [
        *("resolved", "ignored", "bad_labels", "bad_labels", "no_rank", "no_rank", "no_rank"),
    ]
    assert answers[3]["detail"] == "capture is one of torch, stacks, memory"
    assert answers[4]["detail"] == "no running rank of job 'other' is known here"
    assert node.captures() == []
    assert {answer["outcome"] for answer in answers} <= set(ALERT_OUTCOMES)


def test_grafanas_webhook_says_more_and_is_taken(site):
    _, client = site()
    more = {"silenceURL": "https://grafana.example", "values": {"B": 44.2}, "orgId": 1}
    body = notification({**alert(training_job="train"), **more})
    body |= {"title": "[FIRING:1]", "state": "alerting", "message": "…", "orgId": 1, "version": "1"}
    assert client.post(WEBHOOK, json=body).json()["alerts"][0]["outcome"] == "captured"


def test_an_alert_without_a_fingerprint_is_known_by_its_labels(site):
    _, client = site(cooldown_s=0)
    old = alert(training_job="train", rank="0")
    del old["fingerprint"]
    (first,) = send(client, old)
    assert len(first["fingerprint"]) == 16
    assert send(client, old)[0]["outcome"] == "duplicate"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            b"",
            "invalid JSON: EOF",
        ),
        (
            b"{",
            "invalid JSON: EOF",
        ),
        (b"[]", "expected a mapping"),
        (b"{}", "alerts: this key is needed"),
        (
            b'{"alerts":[{"status":"firing","labels":{"rank":1},"startsAt":""}]}',
            "alerts.0.labels.rank: expected a text",
        ),
        (
            b'{"alerts":[{"status":"maybe","labels":{},"startsAt":""}]}',
            "alerts.0.status: expected one of firing, resolved",
        ),
        (b"[" * 100_000, None),
    ],
)
def test_what_is_no_webhook_is_refused_in_one_line(shared, body, says):
    _, client = shared
    answer = client.post(WEBHOOK, content=body, headers=JSON)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["reason"] == "bad_request"
    assert says is None or error["detail"].startswith(says)
    assert "\n" not in error["detail"] and len(error["detail"]) < 300


def test_a_body_that_is_too_large_or_not_declared_is_refused(shared):
    _, client = shared
    assert client.post(WEBHOOK, content=b" " * (2**20 + 1), headers=JSON).status_code == 413
    assert client.post(WEBHOOK, content=b"{}").status_code == 415
    assert client.get(WEBHOOK).status_code == 405


def test_a_wrong_token_does_nothing(site, tmp_path):
    token = tmp_path / "token"
    token.write_text("correct horse\n")
    node, client = site(http={"token_file": token})
    body = notification(alert(training_job="train"))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic d3c6d3c="}):
        assert client.post(WEBHOOK, json=body, headers=headers).status_code == 401
    assert node.captures() == []
    assert node.codes == {401: 3}
    assert "warpwatch_alerts_received_total{" not in client.get("/metrics").text
    right = client.post(WEBHOOK, json=body, headers={"Authorization": "Bearer correct horse"})
    assert right.json()["alerts"][0]["outcome"] == "captured"


def test_a_thousand_alerts_in_one_webhook_are_answered_and_counted(site):
    node, client = site()
    flood = [alert(f"f{i}", training_job=f"train-{i}") for i in range(998)]
    (first, *_) = answers = send(
        client, alert("a", training_job="train"), *flood, alert("z", training_job="train")
    )
    assert len(answers) == 1000
    assert first["outcome"] == "captured"
    assert answers[-1]["outcome"] == "too_many"
    assert node.counted("captured") == 1
    assert node.counted("no_rank") == MAX_ALERTS - 1
    assert node.counted("too_many") == 1000 - MAX_ALERTS
    assert client.get("/metrics").status_code == 200


def test_what_was_captured_before_takes_no_place_of_what_is_new(site):
    _, client = site()
    known = [alert(f"f{i}", training_job="train") for i in range(MAX_ALERTS)]
    assert {answer["outcome"] for answer in send(client, *known)} == {"captured"}
    answers = send(client, *known, alert("new", training_job="other"))
    assert [answer["outcome"] for answer in answers] == [*MAX_ALERTS * ["duplicate"], "no_rank"]


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


def test_answers_beyond_the_thousandth_are_counted_only(site):
    node, client = site()
    body = notification(*(alert(f"f{i}") for i in range(1200)))
    answer = client.post(WEBHOOK, json=body).json()
    assert (len(answer["alerts"]), answer["unlisted"]) == (1000, 200)
    assert node.counted("ignored") + node.counted("too_many") == 1200


def test_a_storm_of_webhooks_is_answered_and_counted(site):
    node, client = site(http={})
    codes: dict[int, int] = {}
    outcomes: dict[str, int] = {}
    for number in range(400):
        body = notification(alert(f"f{number}", training_job="train", kind="straggler"))
        answer = client.post(WEBHOOK, content=json.dumps(body), headers=JSON)
        codes[answer.status_code] = codes.get(answer.status_code, 0) + 1
        if answer.status_code == 200:
            outcome = answer.json()["alerts"][0]["outcome"]
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    # Alertmanager asks again after a 503, and not after a 429.
    assert set(codes) <= {200, 503}
    assert sum(codes.values()) == 400 and codes[200] >= 200
    assert outcomes == {"captured": 1, "refused_cooldown": codes[200] - 1}
    assert node.counted("refused_cooldown") == codes[200] - 1
    assert node.codes == codes
    assert len(node.captures()) == 1
    assert node.counted("captured") == 1
