"""The API as an OpenAPI document, made of the table of routes and the models that it names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, models_json_schema

from warpwatch_serving.models import ErrorAnswer
from warpwatch_serving.routes import Operation

Schema = dict[str, Any]
Model = type[BaseModel]
# Of each model: the reference to its schema.
Schemas = Mapping[Any, Schema]

JSON = "application/json"
# What a status means of every operation; the name of the status says the rest.
_MEANINGS = {
    400: "A parameter or the body is not what is asked for",
    401: "The token is missing or wrong",
    403: "Not from this machine, and no token is configured",
    404: "No such thing here",
    409: "A rank is busy, or the policy says no",
    413: "The body is too large",
    415: "The body is not declared as JSON",
}


def openapi(version: str, operations: Sequence[Operation]) -> Schema:
    """``version``: of the daemon."""
    models = list(dict.fromkeys(_models(operations)))
    references, definitions = models_json_schema(
        models, ref_template="#/components/schemas/{model}", schema_generator=_Generator
    )
    schemas: Schemas = {model: schema for (model, _), schema in references.items()}
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
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


class _Generator(GenerateJsonSchema):
    def field_is_required(self, field: Any, total: bool) -> bool:
        """An answer has every field, also one that has a default."""
        return self.mode == "serialization" or super().field_is_required(field, total)

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _models(operations: Iterable[Operation]) -> Iterator[tuple[Model, JsonSchemaMode]]:
    yield ErrorAnswer, "serialization"
    for operation in operations:
        if operation.body is not None:
            yield operation.body, "validation"
        for answer in (operation.answer, *operation.also.values()):
            if not isinstance(answer, str):
                yield answer, "serialization"


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
    if operation.guarded:
        described["security"] = [{"token": []}, {}]
    return described


def _responses(operation: Operation, schemas: Schemas) -> Schema:
    answers: dict[int, list[Model | str]] = {operation.status: [operation.answer]}
    for status, model in operation.also.items():
        answers.setdefault(status, []).append(model)
    for status in _errors(operation):
        answers.setdefault(status, []).append(ErrorAnswer)
    return {str(status): _response(status, answers[status], schemas) for status in sorted(answers)}


def _errors(operation: Operation) -> Iterator[int]:
    """Statuses that come with an ErrorAnswer."""
    yield from operation.errors
    if operation.filters is not None or operation.body is not None:
        yield 400
    if operation.body is not None:
        yield from (413, 415)
    if operation.guarded:
        yield from (401, 403)


def _response(status: int, answers: list[Model | str], schemas: Schemas) -> Schema:
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
