"""/openapi.json is valid, and every answer is what it describes: golden files have both."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openapi_spec_validator
import pytest

from tests.daemon.http.alert_node import WEBHOOK, alert, notification
from tests.daemon.http.conftest import CAPTURE
from tests.daemon.http.everything import fill

_TABLES = json.loads(Path(__file__).with_name("requests.json").read_bytes())
# Method, path as it is described, and what to ask for; the status that comes back.
ASKED = _TABLES["answered"]
BODIES = _TABLES["bodies"] | {WEBHOOK: notification(alert(training_job="train"))}


@pytest.fixture
def document(client: httpx.Client) -> Any:
    return client.get("/openapi.json").json()


def closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if "properties" in schema else {}
    return {name: closed(one) for name, one in schema.items()} | more


def test_the_document_is_valid_openapi_and_describes_each_operation(document, golden):
    openapi_spec_validator.validate(document)
    document["info"]["version"] = "this one"
    golden("http/openapi.json", json.dumps(document, indent=1, ensure_ascii=False).encode())


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
    answers["get /healthz"]["port"] = 9400
    golden("http/api.json", json.dumps(answers, indent=1).encode())


CAPTURES = "/api/v1/captures"
NESTED = b"[" * 100_000
NO_REQUESTS = (b"", b"{", b'{"job": "\xff"}', b'{"job": "\\ud800"}', NESTED, b"[]", b"{}")


def bodies() -> Iterator[tuple[str, bytes]]:
    for path in (CAPTURES, WEBHOOK):
        yield from ((path, body) for body in NO_REQUESTS)
    for one in _TABLES["refused_alerts"]:
        yield WEBHOOK, json.dumps({"alerts": [one]}).encode()
    for fields in _TABLES["refused_captures"]:
        yield CAPTURES, json.dumps({"job": "a"} | fields).encode()


def said(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert "\n" not in error["detail"] and len(error["detail"]) < 300
    # The rest is the JSON parser's own, and may change with it.
    detail = error["detail"].partition(" at line ")[0]
    return f"{answer.status_code} {error['reason']}: {detail}"


def test_what_is_refused_says_why_in_one_line(client, agent, golden):
    lines = [f"GET {path}: {said(client.get(path))}" for path in _TABLES["refused_paths"]]
    for path, body in bodies():
        answer = client.post(path, content=body, headers={"Content-Type": "Application/JSON;x"})
        lines.append(f"POST {path} {body[:60]!r}: {said(answer)}")
    lines.append(f"DELETE: {said(client.delete(f'{CAPTURES}/{CAPTURE.id}'))}")
    golden("http/refusals.txt", "\n".join(lines).encode())
    assert agent.asked == []
    assert agent.codes == {404: 4, 405: 2, 400: 45}
