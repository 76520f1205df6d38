"""A stand-in of the API server: objects by path, versions, both kinds of patch, and lists.

Its answers were compared with Kubernetes 1.20: the same tests run against that.
"""

import copy
import json
import re
import threading
import urllib.parse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.http.certificates import server_context
from tests.exporters.receiver import Answer, http_server
from tests.fleet.kubernetes.api_server import ApiServer, certificate

_NAMESPACED = re.compile(r"/namespaces/[^/]+(?=/\w+)")


class StandIn(ApiServer):
    """``asked``: method and path of all requests of the fleet. failing: the status that the
    fleet gets. conflicts: how many more of its patches meet another's.
    """

    def __init__(self, folder: Path) -> None:
        made, _ = certificate(folder)
        (folder / "token").write_text("fleet")
        self.objects: dict[str, Any] = {}
        self.asked: list[str] = []
        self.failing = self.conflicts = 0
        self.version = 0
        for name in ("default", "monitoring"):
            self.objects[f"/api/v1/namespaces/{name}"] = {"metadata": {"name": name}}
        self._lock = threading.Lock()
        self._stack = ExitStack()
        url = self._stack.enter_context(http_server(self._answer, server_context(made)))
        super().__init__(folder, "admin", int(url.rpartition(":")[2]))

    def begin(self, patch: pytest.MonkeyPatch) -> ApiServer:
        self.failing = self.conflicts = 0
        super().begin(patch)
        self.asked.clear()
        return self

    def close(self) -> None:
        super().close()
        self._stack.close()

    def _answer(self, method: str, target: str, headers: Any, content: bytes) -> Answer:
        place, body = urllib.parse.urlsplit(target), json.loads(content or "null")
        if headers["Authorization"] == "Bearer fleet":
            self.asked.append(f"{method} {place.path}")
            if self.failing:
                return self.failing, {}, b'{"message": "try again"}'
        with self._lock:
            if method == "GET":
                query = dict(urllib.parse.parse_qsl(place.query))
                status, said = self._get(place.path, query.get("labelSelector"))
            elif method == "POST":
                status, said = self._post(place.path, body)
            elif method == "PATCH":
                is_strategic = "strategic" in headers["Content-Type"]
                status, said = self._patch(place.path, body, is_strategic)
            else:
                status, said = self._delete(place.path)
            return status, {}, json.dumps(said).encode()

    def _save(self, path: str, one: Any) -> Any:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        self.objects[path] = one
        return one

    def _get(self, path: str, label: str | None) -> tuple[int, Any]:
        if path in self.objects:
            return 200, self.objects[path]
        if path.rpartition("/")[2] not in ("nodes", "events", "captures"):
            return 404, {"message": f"{path} not found"}
        found = [
            one
            for name, one in self.objects.items()
            if any(each.startswith(f"{path}/") for each in (name, _NAMESPACED.sub("", name)))
            and (label is None or label in one["metadata"].get("labels", {}))
        ]
        return 200, {"items": found, "metadata": {"resourceVersion": str(self.version)}}

    def _post(self, path: str, body: Any) -> tuple[int, Any]:
        about = body["metadata"]
        name = f"{path}/{about['name']}"
        place = re.match(r".*?/namespaces/([^/]+)/", path)
        if place and f"/api/v1/namespaces/{place[1]}" not in self.objects:
            return 404, {"message": f"namespaces {place[1]!r} not found"}
        if name in self.objects:
            return 409, {"message": f"{name} already exists"}
        about["uid"] = f"uid-{self.version:08d}"
        if place:
            about["namespace"] = place[1]
        return 201, self._save(name, {"spec": {}, "status": {}, **body})

    def _patch(self, path: str, body: Any, is_strategic: bool) -> tuple[int, Any]:
        name, is_status = path.removesuffix("/status"), path.endswith("/status")
        one = copy.deepcopy(self.objects.get(name))
        if one is None:
            return 404, {"message": f"{name} not found"}
        version = body.get("metadata", {}).pop("resourceVersion", None)
        if version and self.conflicts:
            self.conflicts -= 1
            version = "another"
        if version not in (None, one["metadata"]["resourceVersion"]):
            return 409, {"message": "the object has been modified"}
        if is_strategic:
            listed = {c["type"]: c for c in one["status"].get("conditions", [])}
            listed |= {c["type"]: c for c in body["status"]["conditions"]}
            one["status"]["conditions"] = list(listed.values())
        else:
            _merge(one, {key: body[key] for key in body if (key == "status") == is_status})
        return 200, self._save(name, one)

    def _delete(self, path: str) -> tuple[int, Any]:
        """Delete an object, or all of a folder."""
        gone = [name for name in self.objects if f"{name}/".startswith(f"{path}/")]
        for name in gone:
            self.version += 1
            del self.objects[name]
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
