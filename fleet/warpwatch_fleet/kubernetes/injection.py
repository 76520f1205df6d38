"""The webhook that adds the shim to pods with the label `warpwatch.dev/inject: "true"`.

A pod gets an init container with the shim, variables, and folders of its own.
The parts are those of the chart's named templates, so there is one description of them.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from pydantic import ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from warpwatch_fleet.config import InjectionConfig
from warpwatch_runtime.loading import read_yaml
from warpwatch_serving.connection import Connections
from warpwatch_serving.server import Listeners, listen_on
from warpwatch_serving.web_config import Tls, TlsServerConfig
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.sections import Section

Object = Mapping[str, Any]

LABEL = "warpwatch.dev/inject"
# Where a job over several pods has one name; the first that a pod has.
JOB_LABELS = (
    "jobset.sigs.k8s.io/jobset-name",
    "training.kubeflow.org/job-name",
    "batch.kubernetes.io/job-name",
    "job-name",
)
_POD_OWNER, _PYTHONPATH = "WARPWATCH_POD_OWNER", "PYTHONPATH"
# None of a training's; a cluster may have no label by which the API server leaves them out.
_SYSTEM = ("kube-system", "kube-public", "kube-node-lease")


class Parts(Section):
    """Parts of a pod, as Kubernetes writes them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    initContainers: list[dict[str, Any]]
    env: list[dict[str, Any]]
    volumeMounts: list[dict[str, Any]]
    volumes: list[dict[str, Any]]


def load(config: InjectionConfig) -> Parts:
    """Return the parts that are added to pods. Raises UsageError."""
    try:
        return Parts.model_validate(read_yaml(config.file))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"{config.file}: {place or 'file'}: {first['msg']}") from error


def review(request: Object, parts: Parts) -> Object:
    """Return the AdmissionReview for ``request``, which is always admitted."""
    asked = request.get("request") or {}
    pod = asked.get("object") or {}
    about = pod.get("metadata") or {}
    answer: dict[str, Any] = {"uid": asked.get("uid", ""), "allowed": True}
    namespace = asked.get("namespace") or about.get("namespace", "")
    labels = about.get("labels") or {}
    if labels.get(LABEL) == "true" and namespace not in _SYSTEM and "spec" in pod:
        warnings: list[str] = []
        answer["patch"] = list(_operations(pod["spec"], labels, parts, warnings))
        if warnings:
            answer["warnings"] = warnings
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}


def _operations(
    spec: Object, labels: Object, parts: Parts, warnings: list[str]
) -> Iterator[Object]:
    """Return a JSON Patch. Existing parts stay, so an injected pod is not changed again."""
    env = [_named(one, labels) for one in parts.env]
    for number in _training(spec):
        container = spec["containers"][number]
        path = f"/spec/containers/{number}"
        yield from _python_path(container, path, env, warnings)
        yield from _added(f"{path}/env", container.get("env"), env)
        mounts = container.get("volumeMounts")
        yield from _added(f"{path}/volumeMounts", mounts, parts.volumeMounts, "mountPath")
    yield from _added("/spec/initContainers", spec.get("initContainers"), parts.initContainers)
    yield from _added("/spec/volumes", spec.get("volumes"), parts.volumes)


def _training(spec: Object) -> list[int]:
    """Return the containers with GPUs, else the first."""
    containers = spec["containers"]
    with_gpus = [
        number
        for number, one in enumerate(containers)
        if any(
            name.startswith("nvidia.com/")
            for name in (one.get("resources") or {}).get("limits") or ()
        )
    ]
    return with_gpus or [0]


def _named(variable: Object, labels: Object) -> Object:
    """Name the job by the pod's label."""
    label = next((one for one in JOB_LABELS if one in labels), None)
    if variable["name"] != _POD_OWNER or label is None:
        return variable
    field = {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}
    return {"name": _POD_OWNER, "valueFrom": field}


def _python_path(
    container: Object, path: str, env: Sequence[Object], warnings: list[str]
) -> Iterator[Object]:
    """Append the container's own PYTHONPATH to ours."""
    ours = next((one["value"] for one in env if one["name"] == _PYTHONPATH), None)
    for number, one in enumerate(container.get("env") or ()):
        if one["name"] != _PYTHONPATH or ours is None:
            continue
        theirs = one.get("value", "")
        if "valueFrom" in one:
            warnings.append(f"{container['name']}: PYTHONPATH is from elsewhere; add {ours} to it")
        elif ours not in theirs.split(":"):
            value = f"{ours}:{theirs}".rstrip(":")
            # The API drops an empty value; only one that is there can be replaced.
            operation = "replace" if "value" in one else "add"
            yield {"op": operation, "path": f"{path}/env/{number}/value", "value": value}


def _added(
    path: str, there: Sequence[Object] | None, more: Sequence[Object], key: str = "name"
) -> Iterator[Object]:
    known = {one[key] for one in there or ()}
    wanted = [one for one in more if one[key] not in known]
    if wanted and not there:
        yield {"op": "add", "path": path, "value": wanted}
    else:
        yield from ({"op": "add", "path": f"{path}/-", "value": one} for one in wanted)


# An object of the API is at most 1.5 MiB.
MAX_BYTES = 2 * 2**20
# API servers ask over a few connections each; together they may hold MAX_BYTES of each.
MAX_REQUESTS = 64


class InjectionServer:
    """Serves in a thread of its own, so that no client delays the loop that follows the agents.

    Raises UsageError.
    """

    def __init__(self, config: InjectionConfig) -> None:
        self._parts = load(config)
        try:
            tls = Tls(TlsServerConfig(cert_file=config.cert_file, key_file=config.key_file))
        except UsageError as error:
            raise UsageError(f"fleet.kubernetes.injection: {error}") from error
        self.listener = listen_on(config.listen, "fleet.kubernetes.injection.listen")
        self._listeners = Listeners(tls.renew)
        app = Starlette(routes=[Route("/inject", self._inject, methods=["POST"])])
        connections = Connections(app, tls, MAX_REQUESTS, MAX_REQUESTS)
        self._listeners.add(self.listener, connections)

    async def run_beside(self) -> None:
        """Serve in a thread until cancelled."""
        serve = self._listeners.serve
        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="injection")
        thread.start()
        try:
            await asyncio.Event().wait()
        finally:
            self._listeners.stop()
            thread.join()

    async def _inject(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BYTES:
                return Response(status_code=413)
        return answer(body, self._parts)


def answer(body: bytes, parts: Parts) -> Response:
    """Return the reviewed pod, or 400 for a body that is not the review of a pod."""
    try:
        asked = msgspec.json.decode(body, type=dict[str, Any])
        reviewed = dict(review(asked, parts))
        response = reviewed["response"]
        if "patch" in response:
            patch = base64.b64encode(msgspec.json.encode(response["patch"])).decode()
            reviewed["response"] = {**response, "patch": patch, "patchType": "JSONPatch"}
        return Response(msgspec.json.encode(reviewed), media_type="application/json")
    except (
        msgspec.MsgspecError,
        ValueError,
        RecursionError,
        LookupError,
        TypeError,
        AttributeError,
    ):
        # The API server checks pods before it sends them, so this came from somebody else.
        return Response("an AdmissionReview of a pod is needed\n", 400)
