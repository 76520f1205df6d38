"""Every route over a real connection."""

from __future__ import annotations

import gzip
import socket
from dataclasses import replace

import httpx
import pytest

from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.samples import DeviceProcess

CAPTURE_ID = "20260921T141959-3f9a1c"


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


def test_devices_have_their_identity_and_values_by_series(client):
    device = client.get("/api/v1/devices").json()["devices"][1]
    assert device["uuid"] == "GPU-5f1d0000-0000-0000-0000-000000000001"
    assert (device["index"], device["up"]) == (1, True)
    assert device["values"]["power_watts"] == 462.0
    assert device["values"]["clock_hertz{domain=sm}"] == 1.755e9


def test_a_number_that_json_lacks_is_null(client, agent):
    device = agent.now.devices[0]
    broken = replace(device, values={("device_power_watts", ()): float("nan")})
    agent.now = replace(agent.now, devices=(broken,))
    assert client.get("/api/v1/devices").json()["devices"][0]["values"] == {"power_watts": None}


def test_a_name_that_is_no_unicode_hides_nothing_else(client, agent):
    device = agent.now.devices[0]
    watts = {("device_power_watts", ()): float("inf")}
    broken = replace(device, values=watts, processes=(DeviceProcess(7, "caf\udce9"),))
    agent.now = replace(agent.now, devices=(broken, agent.now.devices[1]))
    first, second = client.get("/api/v1/devices").json()["devices"]
    assert (first["processes"][0]["name"], first["values"]) == ("caf\udce9", {"power_watts": None})
    assert second["values"]["power_watts"] == 462.0


@pytest.mark.parametrize(
    ("path", "count"),
    [
        ("ranks", 2),
        ("ranks?job=llama-7b", 2),
        ("ranks?job=other", 0),
        ("jobs", 1),
        ("jobs?job=other", 0),
        ("anomalies", 2),
        ("anomalies?active=true", 1),
        ("anomalies?active=false&kind=data_stall", 1),
        ("anomalies?kind=hang", 0),
        ("captures", 2),
        ("captures?kind=stacks", 0),
        ("captures?active=true", 0),
        ("diagnoses", 1),
        ("diagnoses?job=other", 0),
    ],
)
def test_lists_are_filtered(client, path, count):
    name = path.partition("?")[0]
    assert len(client.get(f"/api/v1/{path}").json()[name]) == count


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("jobs=llama-7b", "query: jobs: unknown key, did you mean 'job'?"),
        ("active=maybe", "query: active: expected true or false"),
        ("rank=1", "query: rank: unknown key"),
    ],
)
def test_a_parameter_that_means_nothing_is_refused(client, query, detail):
    answer = client.get(f"/api/v1/anomalies?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"] == {"reason": "bad_request", "detail": detail}


def test_a_diagnosis_names_its_capture(client):
    (diagnosis,) = client.get("/api/v1/diagnoses").json()["diagnoses"]
    assert diagnosis["capture"] == CAPTURE_ID
    assert diagnosis["diagnosis"]["verdict"] == "host_bound"


def test_one_capture_is_found_by_its_id(client):
    capture = client.get(f"/api/v1/captures/{CAPTURE_ID}").json()
    assert capture["outcome"] == "complete"
    assert capture["ranks"][1]["file"] == "rank1.pt.trace.json.gz"
    missing = client.get("/api/v1/captures/other")
    assert missing.status_code == 404
    assert missing.json() == {
        "error": {"reason": "not_found", "detail": "there is no such capture"}
    }


def test_a_capture_is_asked_for(client, agent):
    body = {"job": "llama-7b", "ranks": [1, 0, 1], "steps": 3, "reason": "slow"}
    answer = client.post("/api/v1/captures", json=body)
    assert answer.status_code == 202
    assert answer.headers["location"] == "/api/v1/captures/20260921T150000-aaaaaa"
    assert answer.json()["outcome"] is None
    (asked,) = agent.asked
    assert (asked.job, asked.ranks, asked.steps, asked.kind) == ("llama-7b", (0, 1), 3, "torch")
    assert (asked.trigger, asked.reason) == ("manual", "slow")


@pytest.mark.parametrize(
    ("reason", "status"),
    [("refused_no_rank", 404), ("refused_busy", 409), ("refused_disk", 503)],
)
def test_a_refusal_keeps_its_reason(client, agent, reason, status):
    agent.refusal = Refused(reason, "not now")
    answer = client.post("/api/v1/captures", json={"job": "llama-7b"})
    assert answer.status_code == status
    assert answer.json() == {"error": {"reason": reason, "detail": "not now"}}


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b"", "invalid JSON"),
        (b"{", "invalid JSON"),
        (b'{"job": "\xff"}', "invalid JSON"),
        (b'{"job": "\\ud800"}', "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        (b"[]", "expected a mapping"),
        (b"{}", "job: this key is needed"),
        (b'{"job": 7}', "job: expected a text"),
        (b'{"job": "a", "steps": 0}', "steps: expected a number >= 1"),
        (b'{"job": "a", "steps": 101}', "steps: expected a number <= 100"),
        (b'{"job": "a", "steps": true}', "steps: expected a whole number"),
        (b'{"job": "a", "steps": "3"}', "steps: expected a whole number"),
        (b'{"job": "a", "ranks": []}', "ranks: list should have at least 1 item"),
        (b'{"job": "a", "ranks": [0, -1]}', "ranks.1: expected a number >= 0"),
        (b'{"job": "a", "ranks": [true]}', "ranks.0: expected a whole number"),
        (b'{"job": "a", "kind": "gdb"}', "kind: expected one of torch, "),
        (b'{"job": "a", "kind": "dynolog"}', "kind: expected one of torch, memory, stacks, nsys"),
        (b'{"job": "a", "options": ["nvtx"]}', "options.0: expected one of stacks, shapes, memory"),
        (
            b'{"job": "a", "kind": "stacks", "options": ["shapes"]}',
            "options: kind torch has them, stacks has none",
        ),
        (b'{"job": "a", "step": 3}', "step: unknown key, did you mean 'steps'?"),
        (b'{"job": "a", "trigger": "anomaly"}', "trigger: unknown key"),
    ],
)
def test_a_body_that_is_no_request_is_refused_and_what_is_wrong_is_named(
    client, agent, body, detail
):
    answer = client.post(
        "/api/v1/captures", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["reason"] == "bad_request"
    assert answer.json()["error"]["detail"].startswith(detail)
    assert agent.asked == []


def test_unknown_paths_and_methods_are_json_errors_and_counted(client, agent):
    assert client.get("/nothing").json()["error"]["reason"] == "not_found"
    assert client.get("/metrics/").status_code == 404
    wrong = client.delete("/api/v1/captures")
    assert wrong.status_code == 405
    assert wrong.json()["error"]["reason"] == "method_not_allowed"
    client.get("/healthz")
    assert agent.codes == {404: 2, 405: 1, 200: 1}


def test_a_fault_of_the_daemon_is_reported_without_its_insides(client, agent, monkeypatch):
    def fail():
        raise RuntimeError("secret path /etc/x")

    monkeypatch.setattr(agent, "state", fail)
    answer = client.get("/api/v1/devices")
    assert answer.status_code == 500
    assert answer.json()["error"]["reason"] == "internal"
    assert "secret" not in answer.text
    assert agent.codes[500] == 1


def test_metrics_come_as_text(client):
    answer = client.get("/metrics", headers={"Accept-Encoding": "identity"})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "content-encoding" not in answer.headers
    assert (
        'warpwatch_steps_total{training_job="llama-7b",rank="1",owner="uid/1000"} 480'
        in answer.text
    )


def test_metrics_come_as_openmetrics_and_compressed_when_asked_for(client):
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
    headers = {"Accept": accept, "Accept-Encoding": "gzip"}
    with client.stream("GET", "/metrics", headers=headers) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-encoding"] == "gzip"
    assert gzip.decompress(raw).endswith(b"# EOF\n")


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


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (
            PROMETHEUS_3,
            "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=allow-utf-8",
        ),
        (
            PROMETHEUS_2,
            "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores",
        ),
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


def test_something_that_is_not_http_is_turned_away(serve):
    server = serve()
    with socket.create_connection(server.address, timeout=30) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert httpx.get(server.url + "healthz").status_code == 200
