"""What the tests say to an API server: nodes, namespaces and pods."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from tests.devices.attribution.pause_image import IMAGE

_CORE = "/api/v1"


class KubernetesApi:
    """Pods are for ``node`` and get there without a scheduler."""

    def __init__(self, server: str, token: str, node: str) -> None:
        self.server = server
        self._node = node
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        # The server made its certificate itself.
        self._tls = ssl._create_unverified_context()

    def answers(self, path: str) -> bool:
        """Whether the object at ``path``, behind /api/v1/, is there."""
        try:
            self._ask("GET", path)
        except (OSError, urllib.error.HTTPError):
            return False
        return True

    def has_node(self) -> bool:
        return self.answers(f"nodes/{self._node}")

    def allocatable(self, resource: str) -> int:
        """How many of an extended resource the node offers."""
        node = self._ask("GET", f"nodes/{self._node}")
        return int(node["status"].get("allocatable", {}).get(resource, 0))

    def create_namespace(self, name: str) -> None:
        self._ask("POST", "namespaces", {"metadata": {"name": name}})

    def create_pod(self, namespace: str, name: str, limits: dict[str, str]) -> str:
        """Of one container ``main`` that does nothing for ever; the pod's UID."""
        container = {
            "name": "main",
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "resources": {"limits": {"memory": "64Mi", "cpu": "100m", **limits}},
        }
        spec = {
            "nodeName": self._node,
            "hostNetwork": True,
            "automountServiceAccountToken": False,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "tolerations": [{"operator": "Exists"}],
            "containers": [container],
        }
        pod = {"metadata": {"name": name}, "spec": spec}
        created = self._ask("POST", f"namespaces/{namespace}/pods", pod)
        return str(created["metadata"]["uid"])

    def delete_pod(self, namespace: str, name: str) -> None:
        self._ask("DELETE", f"namespaces/{namespace}/pods/{name}")

    def phase(self, namespace: str, name: str) -> str:
        return str(self._pod(namespace, name)["status"].get("phase"))

    def container_id(self, namespace: str, name: str) -> str:
        """Of the pod's only container, once it runs."""
        (status,) = self._pod(namespace, name)["status"]["containerStatuses"]
        return str(status["containerID"]).rpartition("/")[2]

    def _pod(self, namespace: str, name: str) -> Any:
        return self._ask("GET", f"namespaces/{namespace}/pods/{name}")

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        url = f"{self.server}{_CORE}/{path}"
        request = urllib.request.Request(url, data, self._headers, method=method)
        with urllib.request.urlopen(request, timeout=300, context=self._tls) as response:
            return json.load(response)
