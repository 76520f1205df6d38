"""/openapi.json is valid, and every answer is what it says."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import openapi_spec_validator
import pytest

from tests.daemon.http.alert_node import alert, notification
from tests.daemon.http.conftest import CAPTURE, MemoryAgent
from tests.daemon.http.everything import fill
from warpwatch_telemetry.errors import Refused

# Method, path as it is described, and what to ask for; the status that comes back.
ASKED = [
    ("get", "/healthz", "/healthz", 200),
    ("post", "/api/v1/leases", "/api/v1/leases", 200),
    ("get", "/readyz", "/readyz", 503),
    ("get", "/api/v1/devices", "/api/v1/devices", 200),
    ("get", "/api/v1/jobs", "/api/v1/jobs?job=llama-7b", 200),
    ("get", "/api/v1/ranks", "/api/v1/ranks?job=llama-7b", 200),
    ("get", "/api/v1/anomalies", "/api/v1/anomalies?kind=straggler&active=true", 200),
    ("get", "/api/v1/anomalies/{id}", "/api/v1/anomalies/a7", 200),
    ("get", "/api/v1/anomalies/{id}", "/api/v1/anomalies/never", 404),
    ("get", "/api/v1/detectors", "/api/v1/detectors?kind=data_stall", 200),
    ("get", "/api/v1/captures", "/api/v1/captures?kind=torch&active=false", 200),
    ("get", "/api/v1/captures", "/api/v1/captures?kinds=torch", 400),
    ("post", "/api/v1/captures", "/api/v1/captures", 202),
    ("post", "/api/v1/captures/prepare", "/api/v1/captures/prepare", 200),
    ("post", "/api/v1/captures/{id}/cancel", f"/api/v1/captures/{CAPTURE.id}/cancel", 200),
    ("post", "/api/v1/captures/{id}/cancel", "/api/v1/captures/none/cancel", 404),
    ("get", "/api/v1/captures/{id}", f"/api/v1/captures/{CAPTURE.id}", 200),
    ("get", "/api/v1/captures/{id}/{file}", f"/api/v1/captures/{CAPTURE.id}/none", 404),
    ("get", "/api/v1/runs", "/api/v1/runs?job=llama-7b&active=true", 200),
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


@pytest.fixture
def full(agent: MemoryAgent) -> None:
    fill(agent)


def closed(schema: Any) -> Any:
    """The schema without room for fields that it does not name."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if "properties" in schema else {}
    return {name: closed(one) for name, one in schema.items()} | more


def test_the_document_is_valid_openapi(document: Any) -> None:
    openapi_spec_validator.validate(document)
    assert document["openapi"] == "3.1.0"
    assert document["info"]["version"] == "0.1.0"


def test_every_json_answer_is_tried_here(document: Any) -> None:
    described = {
        (method, path, int(status))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        for status, response in operation["responses"].items()
        if "schema" in response["content"].get("application/json", {}) and int(status) < 400
    }
    assert described <= {(method, path, status) for method, path, _, status in ASKED} | {
        ("get", "/readyz", 200)
    }


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(("method", "path", "asked", "status"), ASKED)
def test_an_answer_has_exactly_the_fields_that_are_described(
    client: httpx.Client, document: Any, method: str, path: str, asked: str, status: int
) -> None:
    answer = client.request(method, asked, json=BODIES.get(path) if method == "post" else None)
    assert answer.status_code == status
    described = document["paths"][path][method]["responses"][str(status)]
    schema = described["content"]["application/json"]["schema"]
    components = closed(document["components"])
    jsonschema.Draft202012Validator({**schema, "components": components}).validate(answer.json())


@pytest.mark.parametrize(
    ("body", "valid"),
    [
        ({"job": "llama-7b", "ranks": None, "backend": None, "steps": 100}, True),
        ({}, False),
        ({"job": "llama-7b", "steps": 0}, False),
        ({"job": "llama-7b", "step": 3}, False),
    ],
)
def test_a_body_is_taken_if_it_is_as_described(
    client: httpx.Client, document: Any, body: dict[str, Any], valid: bool
) -> None:
    content = document["paths"]["/api/v1/captures"]["post"]["requestBody"]["content"]
    schema = {**content["application/json"]["schema"], "components": document["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) is valid
    assert (client.post("/api/v1/captures", json=body).status_code == 202) is valid


def test_a_refusal_is_an_error_as_described(client: Any, agent: Any, document: Any) -> None:
    agent.refusal = Refused("refused_busy", "not now")
    answer = client.post("/api/v1/captures", json={"job": "llama-7b"}).json()
    schema = {"$ref": "#/components/schemas/ErrorAnswer", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(answer)


def test_the_filters_of_a_list_are_described(document: Any) -> None:
    anomalies = document["paths"]["/api/v1/anomalies"]["get"]
    assert [one["name"] for one in anomalies["parameters"]] == ["job", "owner", "kind", "active"]
    assert {one["in"] for one in anomalies["parameters"]} == {"query"}
    file = document["paths"]["/api/v1/captures/{id}/{file}"]["get"]
    parameters = [(one["name"], one["in"]) for one in file["parameters"]]
    assert parameters == [("id", "path"), ("file", "path")]
    assert file["security"] == [{"token": []}, {}]
