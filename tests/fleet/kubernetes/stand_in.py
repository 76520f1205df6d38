"""A stand-in of the API server: objects by path, versions, both kinds of patch, and lists.

Its answers were compared with Kubernetes 1.20: the same tests run against that.
"""

import copy
import http.server
import json
import re
import ssl
import threading
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.kubernetes.api_server import ApiServer, certificate

_NAMESPACED = re.compile(r"/namespaces/[^/]+(?=/\w+)")


class StandIn(ApiServer):
    """``asked``: method and path of all requests of the fleet. failing: the status that the
    fleet gets. conflicts: how many more of its patches meet another's.
    """

    def __init__(self, folder: Path) -> None:
        made = certificate(folder)
        (folder / "token").write_text("fleet")
        self.objects: dict[str, Any] = {}
        self.asked: list[str] = []
        self.failing = self.conflicts = 0
        self.version = 0
        for name in ("default", "monitoring"):
            self.objects[f"/api/v1/namespaces/{name}"] = {"metadata": {"name": name}}
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"server_in": self})
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*made)
        # Each in its own thread: a client that leaves before it holds up no other.
        self._http.socket = context.wrap_socket(
            self._http.socket, server_side=True, do_handshake_on_connect=False
        )
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        super().__init__(folder, "admin", self._http.server_address[1])

    def begin(self, patch: pytest.MonkeyPatch) -> ApiServer:
        self.failing = self.conflicts = 0
        super().begin(patch)
        self.asked.clear()
        return self

    def close(self) -> None:
        super().close()
        self._http.shutdown()
        self._http.server_close()

    def save(self, path: str, what: str, one: Any) -> Any:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        if what == "DELETED":
            self.objects.pop(path)
        else:
            self.objects[path] = one
        return one


class _Handler(http.server.BaseHTTPRequestHandler):
    server_in: StandIn
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        place, store = urllib.parse.urlsplit(self.path), self.server_in
        self.query = dict(urllib.parse.parse_qsl(place.query))
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        if self.headers["Authorization"] == "Bearer fleet":
            store.asked.append(f"{self.command} {place.path}")
            if store.failing:
                return self._answer(store.failing, {"message": "try again"})
        with store.lock:
            self._answer(*getattr(self, f"_{self.command.lower()}")(place.path, body))

    do_GET = do_POST = do_PATCH = do_DELETE = _serve

    def _answer(self, status: int, said: Any) -> None:
        content = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _get(self, path: str, _: Any) -> tuple[int, Any]:
        store, label = self.server_in, self.query.get("labelSelector")
        if path in store.objects:
            return 200, store.objects[path]
        if path.rpartition("/")[2] not in ("nodes", "events", "captures"):
            return 404, {"message": f"{path} not found"}
        found = [
            one
            for name, one in store.objects.items()
            if any(each.startswith(f"{path}/") for each in (name, _NAMESPACED.sub("", name)))
            and (label is None or label in one["metadata"].get("labels", {}))
        ]
        return 200, {"items": found, "metadata": {"resourceVersion": str(store.version)}}

    def _post(self, path: str, body: Any) -> tuple[int, Any]:
        store, about = self.server_in, body["metadata"]
        name = f"{path}/{about['name']}"
        place = re.match(r".*?/namespaces/([^/]+)/", path)
        if place and f"/api/v1/namespaces/{place[1]}" not in store.objects:
            return 404, {"message": f"namespaces {place[1]!r} not found"}
        if name in store.objects:
            return 409, {"message": f"{name} already exists"}
        about["uid"] = f"uid-{store.version:08d}"
        if place:
            about["namespace"] = place[1]
        return 201, store.save(name, "ADDED", {"spec": {}, "status": {}, **body})

    def _patch(self, path: str, body: Any) -> tuple[int, Any]:
        store = self.server_in
        name, is_status = path.removesuffix("/status"), path.endswith("/status")
        one = copy.deepcopy(store.objects.get(name))
        if one is None:
            return 404, {"message": f"{name} not found"}
        version = body.get("metadata", {}).pop("resourceVersion", None)
        if version and store.conflicts:
            store.conflicts -= 1
            version = "another"
        if version not in (None, one["metadata"]["resourceVersion"]):
            return 409, {"message": "the object has been modified"}
        if "strategic" in self.headers["Content-Type"]:
            listed = {c["type"]: c for c in one["status"].get("conditions", [])}
            listed |= {c["type"]: c for c in body["status"]["conditions"]}
            one["status"]["conditions"] = list(listed.values())
        else:
            _merge(one, {key: body[key] for key in body if (key == "status") == is_status})
        return 200, store.save(name, "MODIFIED", one)

    def _delete(self, path: str, _: Any) -> tuple[int, Any]:
        """One, or all of a folder."""
        for name, one in list(self.server_in.objects.items()):
            if f"{name}/".startswith(f"{path}/"):
                self.server_in.save(name, "DELETED", one)
        return 200, {}


def _merge(one: Any, patch: Any) -> None:
    """JSON Merge Patch, in place."""
    for key, value in patch.items():
        if value is None:
            one.pop(key, None)
        elif isinstance(value, dict):
            _merge(one.setdefault(key, {}), value)
        else:
            one[key] = value
