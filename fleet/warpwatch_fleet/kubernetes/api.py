"""The API server of the cluster, asked with the token of the pod's service account."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from warpwatch_fleet.transport import Transport
from warpwatch_telemetry.errors import UsageError

TIMEOUT_S = 15.0
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"

Object = dict[str, Any]


class Metadata(msgspec.Struct):
    """The metadata that every object has."""

    name: str
    resourceVersion: str


class KubernetesError(Exception):
    """One line. status: of HTTP, 0 where the server was not reached."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status

    @property
    def is_of_one_object(self) -> bool:
        """Whether the server refused this object, and can take others."""
        return self.status in (400, 403, 404, 409, 422)


class KubernetesClient:
    """For one event loop. ``folder`` has ``token`` and ``ca.crt``. Raises UsageError."""

    def __init__(self, folder: Path) -> None:
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        if not host:
            raise UsageError(
                "fleet.kubernetes: KUBERNETES_SERVICE_HOST is not set; it is for pods of a cluster"
            )
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        self._token = folder / "token"
        try:
            verify = ssl.create_default_context(cafile=folder / "ca.crt")
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"fleet.kubernetes: cannot use {folder / 'ca.crt'}: {error}"
            ) from error
        self._client = httpx.AsyncClient(
            base_url=f"https://{f'[{host}]' if ':' in host else host}:{port}",
            transport=Transport(verify=verify, trust_env=False),
            timeout=TIMEOUT_S,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        form: str = "application/json",
        params: Mapping[str, str] | None = None,
        shape: type[msgspec.Struct] | None = None,
    ) -> Object:
        """Return the object that the server answers. Raises KubernetesError.

        form: the media type of the body. shape: the fields that the answer must have.
        """
        headers = {**self._headers(), "Content-Type": form}
        content = None if body is None else msgspec.json.encode(body)
        try:
            answer = await self._client.request(
                method, path, content=content, params=params, headers=headers
            )
        except httpx.HTTPError as error:
            raise KubernetesError(0, f"{type(error).__name__}: {error}"[:200]) from error
        return _decoded(answer.status_code, answer.content, shape)

    def _headers(self) -> dict[str, str]:
        """Return the headers with the token, which the kubelet renews in its file."""
        try:
            return {"Authorization": f"Bearer {self._token.read_text().strip()}"}
        except OSError as error:
            raise KubernetesError(0, f"{self._token}: {error.strerror}") from error


def _decoded(status: int, content: bytes, shape: type[msgspec.Struct] | None = None) -> Object:
    """Return the object. Raises KubernetesError for an error, or another shape."""
    try:
        reply = msgspec.json.decode(content, type=dict[str, Any])
    except (ValueError, RecursionError):
        reply = {"message": content.decode(errors="replace")}
        status = 502 if status < 300 else status
    if status >= 300:
        text = " ".join(str(reply.get("message", "")).split())[:200]
        raise KubernetesError(status, f"{status}: {text}")
    if shape is not None and (wrong := misshapen(reply, shape)):
        raise KubernetesError(502, f"the answer has another form: {wrong}")
    return reply


def misshapen(one: Object, shape: type[msgspec.Struct]) -> str:
    """Return how the object differs from the shape, or nothing."""
    try:
        msgspec.convert(one, shape)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def node_path(name: str, *more: str) -> str:
    """Return the path of a node, or of what is below it."""
    return "/".join(("/api/v1/nodes", *(quote(part, safe="") for part in (name, *more))))


def timestamp(time: float) -> str:
    """Return a time as the API server writes it: RFC 3339, whole seconds."""
    return datetime.fromtimestamp(int(time), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """Return the wall clock of a ``timestamp``. Raises ValueError."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
