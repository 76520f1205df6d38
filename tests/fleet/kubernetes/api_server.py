"""The API server that the tests ask: a stand-in of it, or a real one (WARPWATCH_TEST_APISERVER)."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon.http.certificates import make_certificate
from tests.waiting import DEADLINE_S

NODE = "gpu-1"
TEAM = "/api/v1/namespaces/team"
CAPTURES = "/apis/warpwatch.dev/v1alpha1/namespaces/team/captures"
EVENTS = "/api/v1/namespaces/{}/events"


class ApiServer:
    """``folder`` gets ``token`` and ``ca.crt``, as a pod's service account has them."""

    def __init__(self, folder: Path, admin: str, port: int) -> None:
        self.folder = folder
        self.port = port
        self._admin = httpx.Client(
            base_url=f"https://127.0.0.1:{port}",
            verify=ssl.create_default_context(cafile=folder / "ca.crt"),
            headers={"Authorization": f"Bearer {admin}"},
            timeout=DEADLINE_S,
        )

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """As a person with all rights."""
        if method == "PATCH":
            headers.setdefault("Content-Type", "application/merge-patch+json")
        answer = self._admin.request(method, path, json=body, headers=headers)
        assert answer.status_code < 300, f"{method} {path}: {answer.text}"
        return answer.json()

    def status(self, method: str, path: str) -> int:
        return self._admin.request(method, path).status_code

    def create(self, folder: str, kind: str, name: str, **fields: Any) -> Any:
        first, *parts = folder.strip("/").split("/")
        version = parts[0] if first == "api" else "/".join(parts[:2])
        about = {"apiVersion": version, "kind": kind, "metadata": {"name": name}}
        return self.ask("POST", folder, {**about, **fields})

    def begin(self, patch: pytest.MonkeyPatch) -> ApiServer:
        """Be the cluster's server, with nodes and namespace as if nothing had been before."""
        patch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        patch.setenv("KUBERNETES_SERVICE_PORT", str(self.port))
        if self.status("GET", TEAM) != 200:
            self.create("/api/v1/namespaces", "Namespace", "team")
        for path in ("/api/v1/nodes", EVENTS.format("default"), EVENTS.format("team"), CAPTURES):
            if self.status("GET", path) == 200:
                self._admin.delete(path).raise_for_status()
        for name in (NODE, "gpu-2"):
            self.create("/api/v1/nodes", "Node", name)
        return self

    def node(self, name: str = NODE) -> Any:
        return self.ask("GET", f"/api/v1/nodes/{name}")

    def events(self) -> list[Any]:
        items: list[Any] = self.ask("GET", "/api/v1/events")["items"]
        return [one for one in items if one["metadata"]["name"].startswith("warpwatch-")]

    def close(self) -> None:
        self._admin.close()


def certificate(folder: Path) -> tuple[Path, Path]:
    """``tls.crt`` and ``tls.key``; ``ca.crt`` is the certificate itself."""
    made = make_certificate(folder)
    (folder / "ca.crt").write_bytes(made.read_bytes())
    return made, made.with_suffix(".key")
