"""/openapi.json is valid, and every answer is what it describes: golden files have both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openapi_spec_validator
import pytest

from tests.daemon.http.alert_node import WEBHOOK, alert, notification
from tests.daemon.http.conftest import CAPTURE
from tests.daemon.http.everything import fill

# Method, path as it is described, and what to ask for; the status that comes back.
ASKED = [
    ("get", "/healthz", "/healthz", 200),
    ("post", "/api/v1/leases", "/api/v1/leases", 200),
    ("get", "/readyz", "/readyz", 503),
    ("get", "/api/v1/devices", "/api/v1/devices", 200),
    ("get", "/api/v1/jobs", "/api/v1/jobs", 200),
    ("get", "/api/v1/ranks", "/api/v1/ranks", 200),
    ("get", "/api/v1/anomalies", "/api/v1/anomalies", 200),
    ("get", "/api/v1/anomalies/{id}", "/api/v1/anomalies/a7", 200),
    ("get", "/api/v1/anomalies/{id}", "/api/v1/anomalies/never", 404),
    ("get", "/api/v1/detectors", "/api/v1/detectors", 200),
    ("get", "/api/v1/captures", "/api/v1/captures", 200),
    ("get", "/api/v1/captures", "/api/v1/captures?kinds=torch", 400),
    ("post", "/api/v1/captures", "/api/v1/captures", 202),
    ("post", "/api/v1/captures/prepare", "/api/v1/captures/prepare", 200),
    ("post", "/api/v1/captures/{id}/cancel", f"/api/v1/captures/{CAPTURE.id}/cancel", 200),
    ("post", "/api/v1/captures/{id}/cancel", "/api/v1/captures/none/cancel", 404),
    ("get", "/api/v1/captures/{id}", f"/api/v1/captures/{CAPTURE.id}", 200),
    ("get", "/api/v1/captures/{id}/{file}", f"/api/v1/captures/{CAPTURE.id}/none", 404),
    ("get", "/api/v1/runs", "/api/v1/runs", 200),
    ("get", "/api/v1/diagnoses", "/api/v1/diagnoses", 200),
    ("post", "/api/v1/alertmanager", "/api/v1/alertmanager", 200),
]
BODIES = {
    "/api/v1/leases": {"job": "a", "owner": "", "run": "1", "holder": "fleet-0", "seconds": 60.0},
    "/api/v1/captures": {"job": "llama-7b", "ranks": [0], "options": ["stacks"]},
    "/api/v1/captures/prepare": {"job": "llama-7b"},
    "/api/v1/alertmanager": notification(alert(training_job="train")),
}


@pytest.fixture
def document(client: httpx.Client) -> Any:
    return client.get("/openapi.json").json()


def closed(schema: Any) -> Any:
    """Return the schema without room for fields that it does not name."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if "properties" in schema else {}
    return {name: closed(one) for name, one in schema.items()} | more


def test_the_document_is_valid_openapi_and_describes_each_operation(document, golden):
    openapi_spec_validator.validate(document)
    assert document["openapi"] == "3.1.0"
    lines = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            taken = [f"{one['in']} {one['name']}" for one in operation.get("parameters", [])]
            about = [operation.get("security"), *taken, *operation["responses"]]
            lines.append(f"{method} {path}: {', '.join(map(str, about))}")
    golden("http/operations.txt", "\n".join(lines).encode())


def test_every_json_answer_is_tried_here(document: Any) -> None:
    described = {
        (method, path, int(status))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        for status, response in operation["responses"].items()
        if "schema" in response["content"].get("application/json", {}) and int(status) < 400
    }
    tried = {(method, path, status) for method, path, _, status in ASKED}
    assert described <= tried | {("get", "/readyz", 200)}


def test_answers_are_the_golden_ones_and_have_exactly_the_fields_that_are_described(
    client, agent, document, golden
):
    fill(agent)
    answers = {}
    components = closed(document["components"])
    for method, path, asked, status in ASKED:
        answer = client.request(method, asked, json=BODIES.get(path) if method == "post" else None)
        assert answer.status_code == status
        described = document["paths"][path][method]["responses"][str(status)]
        schema = described["content"]["application/json"]["schema"]
        validator = jsonschema.Draft202012Validator({**schema, "components": components})
        answers[f"{method} {asked}"] = answer.json()
        validator.validate(answers[f"{method} {asked}"])
    golden("http/api.json", json.dumps(answers, indent=1).encode())


# --- what is refused ---

CAPTURES = "/api/v1/captures"
NAME = "20261122T201500-0a1b2c"
NESTED = b"[" * 100_000
PATHS = (
    *("/nothing", "/metrics/", f"{CAPTURES}/other", "/api/v1/anomalies/never", WEBHOOK),
    *("/api/v1/anomalies?jobs=llama-7b", "/api/v1/anomalies?active=maybe"),
    *("/api/v1/anomalies?rank=1", "/api/v1/anomalies/a7?job=x", "/api/v1/detectors?rank=1"),
    *("/api/v1/records?after=yesterday", "/api/v1/records?shard=2/2", "/api/v1/records?shard=x"),
)
NO_REQUESTS = (b"", b"{", b'{"job": "\xff"}', b'{"job": "\\ud800"}', NESTED, b"[]", b"{}")
ALERTS: tuple[dict[str, Any], ...] = (
    {"status": "firing", "labels": {"rank": 1}, "startsAt": ""},
    {"status": "maybe", "labels": {}, "startsAt": ""},
)
# Of a capture of the job ``a``, unless they say which.
FIELDS: tuple[dict[str, Any], ...] = (
    {"job": 7},
    *({"steps": steps} for steps in (0, 101, True, "3")),
    *({"ranks": ranks} for ranks in ([], [0, -1], [True])),
    {"kind": "gdb"},
    {"options": ["nvtx"]},
    {"kind": "stacks", "options": ["shapes"]},
    {"step": 3},
    {"trigger": "anomaly"},
    # What a fleet asks for.
    {"id": "../../etc"},
    {"id": f"{NAME}-4"},
    {"start_step": 1},
    {"kind": "stacks", "start_step": 40},
    {"anomaly_id": "a7"},
    {"anomaly_id": "a7", "anomaly_kind": "bad_luck"},
    {"anomaly_seen": {"begin_step": 2**70}},
)


def bodies() -> Iterator[tuple[str, bytes]]:
    for path in (CAPTURES, WEBHOOK):
        yield from ((path, body) for body in NO_REQUESTS)
    yield from ((WEBHOOK, json.dumps({"alerts": [alert]}).encode()) for alert in ALERTS)
    yield from ((CAPTURES, json.dumps({"job": "a"} | fields).encode()) for fields in FIELDS)


def said(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert "\n" not in error["detail"] and len(error["detail"]) < 300
    # The rest is the JSON parser's own, and may change with it.
    detail = error["detail"].partition(" at line ")[0]
    return f"{answer.status_code} {error['reason']}: {detail}"


def test_what_is_refused_says_why_in_one_line(client, agent, golden):
    lines = [f"GET {path}: {said(client.get(path))}" for path in PATHS]
    for path, body in bodies():
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        lines.append(f"POST {path} {body[:60]!r}: {said(answer)}")
    lines.append(f"DELETE: {said(client.delete(f'{CAPTURES}/{CAPTURE.id}'))}")
    golden("http/refusals.txt", "\n".join(lines).encode())
    assert agent.asked == []
    assert agent.codes == {404: 4, 405: 2, 400: 44}
