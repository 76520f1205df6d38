"""Whether an object is one that the API server, or Prometheus Operator, knows every field of."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from jsonschema.validators import Draft202012Validator
from referencing import Registry, Resource

_TEXT = {"type": "string"}
_FLAG = {"type": "boolean"}
_DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h|d|w|y))+$"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}


def _closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": list(required),
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


_KEY = _closed(("key",), name=_TEXT, key=_TEXT, optional=_FLAG)
_SELECTOR = _closed(matchLabels=_TEXTS, matchExpressions=_list({"type": "object"}))
_SOURCE = _closed(secret=_KEY, configMap=_KEY)
# monitoring.coreos.com/v1 as of Prometheus Operator 0.80: the fields that a chart may want.
_RELABELING = _closed(
    action={"enum": ["replace", "keep", "drop", "labeldrop", "labelkeep", "labelmap", "hashmod"]},
    modulus={"type": "integer"},
    regex=_TEXT,
    replacement=_TEXT,
    separator=_TEXT,
    sourceLabels=_list(_TEXT),
    targetLabel=_TEXT,
)
_ENDPOINT = _closed(
    ("port",),
    port=_TEXT,
    path=_TEXT,
    scheme={"enum": ["http", "https"]},
    interval=_DURATION,
    scrapeTimeout=_DURATION,
    honorLabels=_FLAG,
    tlsConfig=_closed(
        ca=_SOURCE, cert=_SOURCE, keySecret=_KEY, serverName=_TEXT, insecureSkipVerify=_FLAG
    ),
    basicAuth=_closed(username=_KEY, password=_KEY),
    relabelings=_list(_RELABELING),
    metricRelabelings=_list(_RELABELING),
)
_RULE = {
    **_closed(
        ("expr",),
        alert=_TEXT,
        record=_TEXT,
        expr=_TEXT,
        **{"for": _DURATION},
        keep_firing_for=_DURATION,
        labels=_TEXTS,
        annotations=_TEXTS,
    ),
    "oneOf": [{"required": ["alert"]}, {"required": ["record"]}],
}
_GROUP = _closed(
    ("name", "rules"),
    name=_TEXT,
    interval=_DURATION,
    limit={"type": "integer"},
    labels=_TEXTS,
    query_offset=_DURATION,
    rules=_list(_RULE),
)
_NAMESPACES = _closed(any=_FLAG, matchNames=_list(_TEXT))
_OF_BOTH: dict[str, Any] = {
    "namespaceSelector": _NAMESPACES,
    "selector": _SELECTOR,
    "attachMetadata": _closed(node=_FLAG),
    "sampleLimit": {"type": "integer", "minimum": 1},
}
OPERATOR = {
    "PodMonitor": _closed(
        ("selector", "podMetricsEndpoints"),
        **_OF_BOTH,
        podMetricsEndpoints=_list(_ENDPOINT),
    ),
    "ServiceMonitor": _closed(
        ("selector", "endpoints"),
        **_OF_BOTH,
        endpoints=_list(_ENDPOINT),
    ),
    "PrometheusRule": _closed(("groups",), groups=_list(_GROUP)),
}


# The library's own function reads its files again for every object.
_FOLDER = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    contents = json.loads((_FOLDER / f"v{version}.0-local-strict/_definitions.json").read_text())
    return Resource.from_contents(contents) @ Registry()


@functools.cache
def _validator(version: str, file: str) -> Draft202012Validator:
    schema = json.loads((_FOLDER / f"v{version}.0-local-strict/{file}").read_text())
    registry = Resource.from_contents(schema) @ _definitions(version)
    return Draft202012Validator(schema, registry=registry)


@functools.cache
def _check(text: str, version: str) -> None:
    each = json.loads(text)
    group, _, of_group = each["apiVersion"].rpartition("/")
    name = "-".join(filter(None, (each["kind"].lower(), group.partition(".")[0], of_group)))
    _validator(version, f"{name}.json").validate(each)


def check(each: dict[str, Any], version: str) -> None:
    """Raises ``jsonschema.ValidationError`` for an unknown or missing field."""
    if each["apiVersion"] == "monitoring.coreos.com/v1":
        assert set(each) == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(each["spec"], OPERATOR[each["kind"]])
    elif each["apiVersion"] != "security.openshift.io/v1":
        # What scenarios share is checked once.
        _check(json.dumps(each, sort_keys=True), version)
