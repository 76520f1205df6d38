"""Whether an object is one that the API server knows every field of."""

import functools
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
from jsonschema.validators import Draft202012Validator
from referencing import Registry, Resource

# The library's own function reads its files again for every object.
_FOLDER = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    contents = json.loads((_FOLDER / f"v{version}.0-local-strict/_definitions.json").read_text())
    return Resource.from_contents(contents) @ Registry()


def fields(name: str, version: str) -> set[str]:
    """Return the fields of an object of the core API, such as Toleration."""
    contents = json.loads((_FOLDER / f"v{version}.0-local-strict/_definitions.json").read_text())
    return set(contents["$defs"][f"io.k8s.api.core.v1.{name}"]["properties"])


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
    """Raises ``jsonschema.ValidationError`` for an unknown or missing field.

    Kubernetes' own schemas lack the objects of operators.
    """
    if not each["apiVersion"].startswith(("monitoring.coreos.com/", "security.openshift.io/")):
        # Objects that scenarios share are checked once.
        _check(json.dumps(each, sort_keys=True), version)
