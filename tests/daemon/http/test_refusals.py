"""What is wrong with a request is named in one line: a golden file has the answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tests.daemon.http.alert_node import WEBHOOK
from tests.daemon.http.conftest import CAPTURE, MemoryAgent

CAPTURES = "/api/v1/captures"
NAME = "20261122T201500-0a1b2c"
NESTED = b"[" * 100_000
PATHS = (
    *("/nothing", "/metrics/", f"{CAPTURES}/other", "/api/v1/anomalies/never", WEBHOOK),
    *("/api/v1/anomalies?jobs=llama-7b", "/api/v1/anomalies?active=maybe"),
    *("/api/v1/anomalies?rank=1", "/api/v1/anomalies/a7?job=x", "/api/v1/detectors?rank=1"),
    *("/api/v1/records?after=yesterday", "/api/v1/records?shard=2/2", "/api/v1/records?shard=x"),
)
BODIES = (b"", b"{", b'{"job": "\xff"}', b'{"job": "\\ud800"}', NESTED, b"[]", b"{}")
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
        yield from ((path, body) for body in BODIES)
    yield from ((WEBHOOK, json.dumps({"alerts": [alert]}).encode()) for alert in ALERTS)
    yield from ((CAPTURES, json.dumps({"job": "a"} | fields).encode()) for fields in FIELDS)


def said(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert "\n" not in error["detail"] and len(error["detail"]) < 300
    # The rest is the JSON parser's own, and may change with it.
    detail = error["detail"].partition(" at line ")[0]
    return f"{answer.status_code} {error['reason']}: {detail}"


def test_what_is_refused_says_why_in_one_line(
    client: httpx.Client, agent: MemoryAgent, golden: Callable[[str, bytes], None]
) -> None:
    lines = [f"GET {path}: {said(client.get(path))}" for path in PATHS]
    for path, body in bodies():
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        lines.append(f"POST {path} {body[:60]!r}: {said(answer)}")
    lines.append(f"DELETE: {said(client.delete(f'{CAPTURES}/{CAPTURE.id}'))}")
    golden("http/refusals.txt", "\n".join(lines).encode())
    assert agent.asked == []
    assert agent.codes.keys() == {400, 404, 405}
