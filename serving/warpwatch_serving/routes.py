"""The operations of the API, and the application and `/openapi.json` that are made of them."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from warpwatch_serving import answers, bodies
from warpwatch_serving.access import Access, Guard, Keys
from warpwatch_serving.answers import ErrorAnswer, HttpError
from warpwatch_serving.api import JsonApi
from warpwatch_serving.backend import ApiBackend
from warpwatch_serving.bodies import Filters
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.metrics import MetricsPages
from warpwatch_serving.page.endpoint import Login, PageEndpoint
from warpwatch_serving.web_config import BasicAuth
from warpwatch_telemetry.captures import Capture

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

    answer: the dataclass of its document, or a media type that is not JSON. also: documents of
    further statuses. errors: statuses with an ErrorAnswer; those for filters, bodies and rights are
    known. is_open: whether anybody may use it: docs/http.md, "Who may do what".
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
    if parameters := list(_parameters(operation)):
        described["parameters"] = parameters
    if operation.body is not None:
        content = {JSON: {"schema": schemas[operation.body]}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.is_open:
        described["security"] = []
    return described


def _responses(operation: Operation, schemas: Schemas) -> Schema:
    errors = [*operation.errors, *(() if operation.is_open else (401, 403))]
    if operation.body is not None:
        errors += [400, 413, 415]
    elif operation.filters is not None:
        errors += [400]
    answers: dict[int, list[type | str]] = {operation.status: [operation.answer]}
    for status, model in (*operation.also.items(), *((error, ErrorAnswer) for error in errors)):
        answers.setdefault(status, []).append(model)
    return {str(status): _response(status, answers[status], schemas) for status in sorted(answers)}


def _response(status: int, answers: list[type | str], schemas: Schemas) -> Schema:
    content: Schema = {answer: {} for answer in answers if isinstance(answer, str)}
    documents = [schemas[answer] for answer in answers if not isinstance(answer, str)]
    if documents:
        content[JSON] = {"schema": documents[0] if len(documents) == 1 else {"anyOf": documents}}
    return {"description": _MEANINGS.get(status, HTTPStatus(status).phrase), "content": content}


def _parameters(operation: Operation) -> Iterator[Schema]:
    for name in re.findall(r"{(\w+)}", operation.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    if operation.filters is not None:
        known = operation.filters.model_json_schema(schema_generator=_Generator)["properties"]
        for name, schema in known.items():
            yield {"name": name, "in": "query", "required": False, "schema": schema}


Routes = Callable[[Any, Access], tuple[JsonApi, Sequence[Operation]]]

_REASONS = {404: "not_found", 405: "method_not_allowed"}


async def describe(request: Request) -> Response:
    """This document."""
    return JSONResponse(request.app.state.document())


def operations(
    api: JsonApi, metrics: MetricsPages, page: PageEndpoint, login: Login
) -> list[Operation]:
    """Return the operations that agents and fleets have."""
    v1, of = "/api/v1", Operation
    octets, missing, refused = "application/octet-stream", (404,), (404, 409, 503)
    return [
        of("/", page.show, "text/html", bodies.PageFilters),
        of("/run", page.show_run, "text/html", bodies.RunFilters, errors=missing),
        of("/login", login.follow_link, "text/html", bodies.LoginFilters, is_open=True,
           errors=(401,)),
        of("/login", login.log_in, "text/html", method="POST", status=303, is_open=True,
           errors=(401,)),
        of("/logout", login.log_out, "text/html", method="POST", status=303),
        of("/metrics", metrics.scrape, "text/plain", is_open=True),
        of("/healthz", api.healthz, answers.Health, is_open=True),
        of("/readyz", api.readyz, answers.Readiness, is_open=True,
           also={503: answers.Readiness}),
        of("/openapi.json", describe, "application/json"),
        of(f"{v1}/sessions", login.make_link, answers.SessionLink, method="POST",
           status=201),
        of(f"{v1}/devices", api.devices, answers.DeviceList, bodies.Filters),
        of(f"{v1}/jobs", api.jobs, answers.JobList, bodies.JobFilters),
        of(f"{v1}/ranks", api.ranks, answers.RankList, bodies.JobFilters),
        of(f"{v1}/anomalies", api.anomalies, answers.AnomalyList, bodies.AnomalyFilters),
        of(f"{v1}/anomalies/{{id}}", api.anomaly, answers.AnomalyInContext, bodies.Filters,
           errors=missing),
        of(f"{v1}/detectors", api.detectors, answers.DetectorList, bodies.DetectorFilters),
        of(f"{v1}/captures", api.captures, answers.CaptureList, bodies.CaptureFilters),
        of(f"{v1}/captures", api.request_capture, Capture, method="POST",
           body=bodies.CaptureBody, status=202, errors=refused),
        of(f"{v1}/captures/{{id}}", api.capture, Capture, errors=missing),
        of(f"{v1}/captures/{{id}}/{{file}}", api.capture_file, octets, errors=(404, 503)),
        of(f"{v1}/alertmanager", api.alertmanager, answers.AlertAnswers, method="POST",
           body=bodies.AlertmanagerPayload, errors=(503,)),
        of(f"{v1}/runs", api.runs, answers.RunList, bodies.RunFilters),
        of(f"{v1}/diagnoses", api.diagnoses, answers.DiagnosisList, bodies.DiagnosisFilters),
    ]  # fmt: skip


def only_common_routes(backend: ApiBackend, access: Access) -> tuple[JsonApi, Sequence[Operation]]:
    """Return the API that agents and fleets share, without further routes."""
    return JsonApi(backend, access), ()


def create_app(
    backend: ApiBackend,
    config: HttpConfig,
    *,
    basic_auth: BasicAuth | None = None,
    page: PageEndpoint | None = None,
    routes: Routes = only_common_routes,
    monotonic: Callable[[], float] = time.monotonic,
    sessions: Keys | None = None,
) -> Starlette:
    """Return the application. ``routes`` makes the API and the routes of this process alone.

    Refresh its ``state.pages`` each second, and set ``state.port`` and ``state.url`` once it is
    listened on. ``state.document`` makes `/openapi.json`. Raises UsageError for a bad token file.
    """
    access = Access(config, monotonic, sessions)
    login = Login(access)
    pages = MetricsPages(backend, monotonic)
    guard = Middleware(
        Guard,
        access=access,
        basic_auth=basic_auth,
        count=lambda status: backend.metrics.counter("http_requests_total").labels(status).inc(),
        refuse=login.refuse,
        prepare=backend.prepare,
    )
    api, more = routes(backend, access)
    table = [*operations(api, pages, page or PageEndpoint(backend), login), *more]
    app = Starlette(
        routes=[Route(one.path, one.endpoint, methods=[one.method]) for one in table],
        middleware=[guard],
        exception_handlers={HTTPException: _http_error},
    )
    # A redirect would go to the host in the Host header.
    app.router.redirect_slashes = False
    app.state.pages = pages
    app.state.port = app.state.url = None
    # It takes 20 ms to make, and is rarely requested.
    app.state.document = cache(lambda: openapi(backend.overview().version, table))
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = _REASONS.get(error.status_code, "refused")
    return HttpError(error.status_code, reason, str(error.detail), error.headers).answer()
