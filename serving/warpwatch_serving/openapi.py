"""The API as an OpenAPI document, made of the table of routes and the models that it names."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from warpwatch_serving.bodies import Filters
from warpwatch_serving.models import ErrorAnswer

Endpoint = Callable[[Request], Awaitable[Response]]
Schema = dict[str, Any]
# The reference to the schema of each model.
Schemas = Mapping[Any, Schema]

JSON = "application/json"
# The meaning of a status for all operations; others are described by the name of the status.
_MEANINGS = {
    400: "A parameter or the body is wrong",
    401: "There is neither a session nor the right token",
    403: "Not for this user, or sent by the page of another site",
    404: "No such thing here",
    409: "A rank is busy, or the policy says no",
    413: "The body is too large",
    415: "The body is not declared as JSON",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. The endpoint's docstring says what it is for.

    answer: the dataclass of its document, or a media type that is not JSON. also: the documents of
    other statuses than ``status``. errors: statuses with an ErrorAnswer, beside those that every
    operation with filters or a body has, and each that is not open. is_open: whether anybody may
    use it: docs/http.md, "Who may do what".
    """

    path: str
    endpoint: Endpoint
    answer: type | str
    filters: type[Filters] | None = None
    method: str = "GET"
    body: type[BaseModel] | None = None
    is_open: bool = False
    status: int = 200
    also: Mapping[int, type] = field(default_factory=dict)
    errors: tuple[int, ...] = ()


def openapi(version: str, operations: Sequence[Operation]) -> Schema:
    """Return the document; ``version``: of the daemon."""
    schemas, components = _components(operations)
    paths: Schema = {}
    for operation in operations:
        methods = paths.setdefault(operation.path, {})
        methods[operation.method.lower()] = _described(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Warpwatch",
            "version": version,
            "description": "The GPUs of a node, the training jobs on them, and what is wrong.",
        },
        "paths": paths,
        # Nothing of both is needed on the Unix socket.
        "security": [{"token": []}, {"session": []}, {}],
        "components": {
            "schemas": components,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": "warpwatch"},
            },
        },
    }


def _components(operations: Sequence[Operation]) -> tuple[Schemas, Schema]:
    """Return references to all models, and their schemas: pydantic's of input, else msgspec's."""
    bodies = list(dict.fromkeys(one.body for one in operations if one.body is not None))
    references, written = models_json_schema(
        [(body, "validation") for body in bodies],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Generator,
    )
    schemas: dict[Any, Schema] = {model: schema for (model, _), schema in references.items()}
    answers = list(dict.fromkeys(_answers(operations)))
    described, components = msgspec.json.schema_components(
        answers, ref_template="#/components/schemas/{name}"
    )
    schemas.update(zip(answers, described, strict=True))
    for schema in components.values():
        # An answer has every field, also one that has a default.
        if "properties" in schema:
            schema["required"] = list(schema["properties"])
        schema.pop("title", None)
    return schemas, components | written["$defs"]


class _Generator(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _answers(operations: Iterable[Operation]) -> Iterator[type]:
    yield ErrorAnswer
    for operation in operations:
        for answer in (operation.answer, *operation.also.values()):
            if not isinstance(answer, str):
                yield answer


def _described(operation: Operation, schemas: Schemas) -> Schema:
    described: Schema = {
        "summary": (operation.endpoint.__doc__ or "").rstrip("."),
        "responses": _responses(operation, schemas),
    }
    if parameters := [*_path_parameters(operation.path), *_query_parameters(operation)]:
        described["parameters"] = parameters
    if operation.body is not None:
        content = {JSON: {"schema": schemas[operation.body]}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.is_open:
        described["security"] = []
    return described


def _responses(operation: Operation, schemas: Schemas) -> Schema:
    answers: dict[int, list[type | str]] = {operation.status: [operation.answer]}
    for status, model in operation.also.items():
        answers.setdefault(status, []).append(model)
    for status in _errors(operation):
        answers.setdefault(status, []).append(ErrorAnswer)
    return {str(status): _response(status, answers[status], schemas) for status in sorted(answers)}


def _errors(operation: Operation) -> Iterator[int]:
    """Yield the statuses with an ErrorAnswer."""
    yield from operation.errors
    if operation.filters is not None or operation.body is not None:
        yield 400
    if operation.body is not None:
        yield from (413, 415)
    if not operation.is_open:
        yield from (401, 403)


def _response(status: int, answers: list[type | str], schemas: Schemas) -> Schema:
    content: Schema = {answer: {} for answer in answers if isinstance(answer, str)}
    documents = [schemas[answer] for answer in answers if not isinstance(answer, str)]
    if documents:
        content[JSON] = {"schema": documents[0] if len(documents) == 1 else {"anyOf": documents}}
    return {"description": _MEANINGS.get(status, HTTPStatus(status).phrase), "content": content}


def _path_parameters(path: str) -> Iterator[Schema]:
    for name in re.findall(r"{(\w+)}", path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameters(operation: Operation) -> Iterator[Schema]:
    if operation.filters is not None:
        known = operation.filters.model_json_schema(schema_generator=_Generator)["properties"]
        for name, schema in known.items():
            yield {"name": name, "in": "query", "required": False, "schema": schema}
