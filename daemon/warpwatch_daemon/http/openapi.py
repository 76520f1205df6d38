"""The API as an OpenAPI document. A test compares it with the routes."""

from __future__ import annotations

from typing import Any

from warpwatch_telemetry.alerts import ALERT_OUTCOMES
from warpwatch_telemetry.anomalies import KINDS
from warpwatch_telemetry.captures import BACKENDS, CAPTURE_KINDS, CAPTURE_OPTIONS

Schema = dict[str, Any]

_ERROR = {"$ref": "#/components/schemas/Error"}


def openapi(version: str) -> Schema:
    """``version``: of the daemon."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Warpwatch",
            "version": version,
            "description": "The GPUs of a node, the training jobs on them, and what is wrong.",
        },
        "paths": _PATHS,
        "components": {
            "schemas": {
                "Error": _ERROR_SCHEMA,
                "CaptureRequest": _CAPTURE_REQUEST,
                "AlertmanagerWebhook": _WEBHOOK,
                "AlertAnswers": _ALERT_ANSWERS,
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _get(summary: str, *parameters: Schema, kind: str = "application/json", **more: str) -> Schema:
    """``more``: descriptions of further answers by status, as ``_404``."""
    answers: Schema = {"200": {"description": "OK", "content": {kind: {}}}}
    for status, description in more.items():
        answers[status.lstrip("_")] = _error(description)
    operation: Schema = {"summary": summary, "responses": answers}
    if parameters:
        operation["parameters"] = list(parameters)
    return operation


def _error(description: str) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": _ERROR}}}


def _parameter(name: str, place: str, schema: Schema) -> Schema:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


_JOB = _parameter("job", "query", {"type": "string"})
_ANOMALY_KIND = _parameter("kind", "query", {"type": "string", "enum": list(KINDS)})
_CAPTURE_KIND = _parameter("kind", "query", {"type": "string", "enum": list(CAPTURE_KINDS)})
_ACTIVE = _parameter("active", "query", {"type": "boolean"})
_ID = _parameter("id", "path", {"type": "string"})
_FILE = _parameter("file", "path", {"type": "string"})

_ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"reason": {"type": "string"}, "detail": {"type": "string"}},
            "required": ["reason", "detail"],
        }
    },
    "required": ["error"],
}
_CAPTURE_REQUEST = {
    "type": "object",
    "properties": {
        "job": {"type": "string", "minLength": 1, "maxLength": 512},
        "kind": {"type": "string", "enum": list(CAPTURE_KINDS), "default": "torch"},
        "ranks": {
            "type": ["array", "null"],
            "items": {"type": "integer", "minimum": 0},
            "minItems": 1,
            "maxItems": 1024,
            "description": "null: all ranks of the job that this daemon sees",
        },
        "steps": {"type": "integer", "minimum": 1, "maximum": 100, "default": 5},
        "options": {
            "type": "array",
            "items": {"type": "string", "enum": list(CAPTURE_OPTIONS)},
            "default": [],
            "description": "of kind torch: what it records besides, at a price",
        },
        "backend": {
            "type": ["string", "null"],
            "enum": [*BACKENDS, None],
            "description": "null: whichever the job has",
        },
        "reason": {"type": "string", "maxLength": 500},
    },
    "required": ["job"],
    "additionalProperties": False,
}
_REQUEST_CAPTURE = {
    "summary": "Ask for a capture. On loopback, or with the token.",
    "security": [{"token": []}, {}],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/CaptureRequest"}}
        },
    },
    "responses": {
        "202": {"description": "Begun", "content": {"application/json": {}}},
        "400": _error("The body is not what is asked for"),
        "401": _error("The token is missing or wrong"),
        "403": _error("Not from this machine, and no token is configured"),
        "404": _error("No such job or rank runs here"),
        "409": _error("A rank is busy, or the policy says no"),
        "413": _error("The body is too large"),
        "415": _error("The body is not declared as JSON"),
        "503": _error("No space"),
    },
}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_WEBHOOK = {
    "type": "object",
    "description": "Alertmanager's webhook, version 4; what is not named here is passed over.",
    "properties": {
        "alerts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "status": {"type": "string", "enum": ["firing", "resolved"]},
                    "labels": _TEXTS,
                    "startsAt": {"type": "string", "maxLength": 64},
                    "fingerprint": {"type": "string", "maxLength": 64},
                },
                "required": ["status", "labels", "startsAt"],
            },
        },
    },
    "required": ["alerts"],
}
_ALERT_ANSWERS = {
    "type": "object",
    "properties": {
        "alerts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "fingerprint": {"type": "string"},
                    "outcome": {"type": "string", "enum": list(ALERT_OUTCOMES)},
                    "detail": {"type": "string"},
                    "capture_id": {"type": ["string", "null"]},
                },
            },
        },
        "unlisted": {"type": "integer", "description": "answers beyond the first 1,000"},
    },
}
_RECEIVE_ALERTS = {
    "summary": "Alerts that fire ask for captures. On loopback, or with the token.",
    "security": [{"token": []}, {}],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/AlertmanagerWebhook"}}
        },
    },
    "responses": {
        "200": {
            "description": "What became of each alert, also where nothing is captured",
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/AlertAnswers"}}
            },
        },
        "400": _error("The body is no webhook of Alertmanager"),
        "401": _error("The token is missing or wrong"),
        "403": _error("Not from this machine, and no token is configured"),
        "413": _error("The body is too large"),
        "415": _error("The body is not declared as JSON"),
        "503": {
            "description": "To be sent again: a peer failed, or the daemon is busy or starting",
            "content": {
                "application/json": {
                    "schema": {"anyOf": [{"$ref": "#/components/schemas/AlertAnswers"}, _ERROR]}
                }
            },
        },
    },
}

_PATHS: Schema = {
    "/": {"get": _get("The web page", kind="text/html")},
    "/metrics": {
        "get": _get("Prometheus text format or OpenMetrics, by Accept", kind="text/plain")
    },
    "/healthz": {"get": _get("Whether the process lives")},
    "/readyz": {"get": _get("Whether every source can be read", _503="Something is missing")},
    "/openapi.json": {"get": _get("This document")},
    "/api/v1/devices": {"get": _get("Devices with their newest values")},
    "/api/v1/jobs": {"get": _get("Jobs", _JOB)},
    "/api/v1/ranks": {"get": _get("Ranks with their newest steps", _JOB)},
    "/api/v1/anomalies": {"get": _get("Anomalies", _JOB, _ANOMALY_KIND, _ACTIVE)},
    "/api/v1/anomalies/{id}": {
        "get": _get(
            "One anomaly, with the metrics of the minutes around it", _ID, _404="No such anomaly"
        )
    },
    "/api/v1/detectors": {
        "get": _get("How the detectors see what they judge, and why", _JOB, _ANOMALY_KIND)
    },
    "/api/v1/captures": {
        "get": _get("Captures", _JOB, _CAPTURE_KIND, _ACTIVE),
        "post": _REQUEST_CAPTURE,
    },
    "/api/v1/captures/{id}": {"get": _get("One capture", _ID, _404="No such capture")},
    "/api/v1/captures/{id}/{file}": {
        "get": _get(
            "A file of a capture. On loopback, or with the token.",
            *(_ID, _FILE),
            kind="application/octet-stream",
            _401="The token is missing or wrong",
            _403="Not from this machine, and no token is configured",
            _404="No such capture or file",
        )
    },
    "/api/v1/alertmanager": {"post": _RECEIVE_ALERTS},
    "/api/v1/diagnoses": {"get": _get("What the captures' traces say", _JOB, _CAPTURE_KIND)},
}
