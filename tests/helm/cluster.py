"""A cluster of one real node that runs DaemonSets, and Helm and kubectl pointed at it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.devices.attribution.kubernetes_node import KubernetesNode
from tests.waiting import eventually

NAMESPACE = "monitoring"


class Cluster(KubernetesNode):
    """A node with what makes pods of a DaemonSet and puts them on it."""

    @property
    def kubeconfig(self) -> Path:
        return self._work / "kubeconfig.json"

    def start(self) -> None:
        super().start()
        common = (f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--port=0")
        for name, port in (("kube-controller-manager", 16444), ("kube-scheduler", 16445)):
            certificates = f"--cert-dir={self._work}/{name}"
            address = ("--bind-address=127.0.0.1", f"--secure-port={port}")
            self._run(f"{self._binaries}/{name}", *common, *address, certificates)

    def load(self, archive: Path) -> None:
        self._ctr("images", "import", str(archive))


class Client:
    """``tool`` is helm or kubectl; raises AssertionError with its output when it fails."""

    def __init__(self, tool: Path, kubeconfig: Path, home: Path) -> None:
        self._tool = tool
        self._environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "HOME": str(home)}

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(self._tool), "--namespace", NAMESPACE, *arguments], env=self._environment,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def get(self, what: str, *arguments: str) -> Any:
        return json.loads(self("get", what, *arguments, "--output", "json"))

    def wait_for_pod(self) -> Any:
        label = "--selector=app.kubernetes.io/component=daemon"

        def ready() -> list[Any]:
            pods: list[Any] = self.get("pods", label)["items"]
            conditions = [c for pod in pods for c in pod["status"].get("conditions", [])]
            is_ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
            return pods if is_ready else []

        (pod,) = eventually(ready, "a pod of the DaemonSet is ready")
        return pod
