"""Every route over a real connection."""

from __future__ import annotations

import gzip
import socket

import pytest

from tests.daemon.http.conftest import TIMEOUT_S
from warpwatch_telemetry.errors import Refused


def test_health_names_the_version(client):
    answer = client.get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "version": "0.1.0"})


def test_readiness_follows_what_is_missing(client, agent):
    assert client.get("/readyz").json()["ready"] is True
    agent.lacks = ("nvml: library not found",)
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["missing"] == ["nvml: library not found"]
    assert [source["name"] for source in answer.json()["sources"]][:2] == ["simulated", "host"]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("ranks", {"": 2, "job=llama-7b": 2, "job=other": 0, "owner=uid/1": 0}),
        ("jobs", {"": 1, "job=other": 0}),
        ("anomalies", {"": 2, "active=true": 1, "active=false&kind=data_stall": 1, "kind=hang": 0}),
        ("captures", {"": 2, "kind=stacks": 0, "active=true": 0}),
        ("diagnoses", {"": 1, "job=other": 0}),
    ],
)
def test_lists_are_filtered(client, name, counts):
    found = {query: client.get(f"/api/v1/{name}?{query}").json()[name] for query in counts}
    assert {query: len(listed) for query, listed in found.items()} == counts


def test_a_capture_is_asked_for(client, agent):
    body = {"job": "llama-7b", "ranks": [1, 0, 1], "steps": 3, "reason": "slow"}
    body |= {"options": ["stacks", "shapes", "shapes"]}
    answer = client.post("/api/v1/captures", json=body)
    assert answer.status_code == 202
    assert answer.headers["location"] == "/api/v1/captures/20260921T150000-aaaaaa"
    assert answer.json()["outcome"] is None
    (asked,) = agent.asked
    assert (asked.job, asked.ranks, asked.steps, asked.kind) == ("llama-7b", (0, 1), 3, "torch")
    assert (asked.trigger, asked.reason) == ("manual", "slow")
    assert asked.options == ("shapes", "stacks")


@pytest.mark.parametrize(
    ("reason", "status"),
    [("refused_no_rank", 404), ("refused_busy", 409), ("refused_disk", 503)],
)
def test_a_refusal_keeps_its_reason(client, agent, reason, status):
    agent.refusal = Refused(reason, "not now")
    answer = client.post("/api/v1/captures", json={"job": "llama-7b"})
    assert answer.status_code == status
    assert answer.json() == {"error": {"reason": reason, "detail": "not now"}}


def test_a_fault_of_the_daemon_is_reported_without_its_insides(client, agent):
    agent.state = lambda: int("secret path /etc/x")
    answer = client.get("/api/v1/devices")
    assert answer.status_code == 500
    assert answer.json()["error"]["reason"] == "internal"
    assert "secret" not in answer.text
    assert agent.codes[500] == 1


def test_metrics_come_as_text_and_compressed_when_asked_for(client):
    plain = client.get("/metrics", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    labels = 'training_job="llama-7b",rank="1",owner="uid/1000"'
    assert f"warpwatch_steps_total{{{labels}}} 480\n" in plain.text
    with client.stream("GET", "/metrics", headers={"Accept-Encoding": "gzip"}) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == "gzip"
    assert gzip.decompress(raw).startswith(b"# HELP warpwatch_")


PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping="


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (PROMETHEUS_3, OPENMETRICS + "allow-utf-8"),
        (PROMETHEUS_2, OPENMETRICS + "underscores"),
        ("text/plain;version=1.0.0", TEXT.replace("0.0.4", "1.0.0") + "; escaping=underscores"),
        ("text/plain;version=0.0.4", TEXT),
        ("*/*", TEXT),
        ("", TEXT),
        ("application/openmetrics-text;version=newest", TEXT),
    ],
)
def test_a_scraper_gets_the_format_that_it_asks_for(client, accept, expected):
    answer = client.get("/metrics", headers={"Accept": accept})
    assert (answer.status_code, answer.headers["content-type"]) == (200, expected)
    assert answer.text.endswith("\n# EOF\n") == ("openmetrics" in expected)


def test_every_answer_carries_the_security_headers(client):
    for path in ("/", "/metrics", "/api/v1/devices", "/nothing"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "server" not in headers


def test_something_that_is_not_http_is_turned_away(client, shared_server):
    with socket.create_connection(shared_server.address, timeout=TIMEOUT_S) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert client.get("/healthz").status_code == 200
