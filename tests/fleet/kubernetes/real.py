"""A real API server with RBAC, and etcd, on loopback: no kubelet, no controllers."""

import shutil
import subprocess
from pathlib import Path

from tests.fleet.kubernetes.api_server import ApiServer, certificate
from tests.helm import chart
from tests.loop.node import poll
from tests.processes import logged
from tests.waiting import DEADLINE_S
from warpwatch_daemon.demo.processes import free_port

ADMIN = "all-rights"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
FOLDERS = {
    "ServiceAccount": "/api/v1/namespaces/monitoring/serviceaccounts",
    "ClusterRole": f"{RBAC}/clusterroles",
    "ClusterRoleBinding": f"{RBAC}/clusterrolebindings",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
}


class RealApiServer(ApiServer):
    """The service account ``default/fleet`` is who asks; it has no right yet."""

    def __init__(self, binary: Path, folder: Path) -> None:
        port, etcd, peers = free_port(), free_port(), free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        (made, own), key = certificate(folder), folder / "service-account.pem"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True)
        (folder / "tokens.csv").write_text(f"{ADMIN},admin,admin,system:masters\n")
        self.log = folder / "log"
        self._run(
            shutil.which("etcd") or "etcd", f"--data-dir={folder}/etcd",
            f"--listen-client-urls=http://127.0.0.1:{etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
        )  # fmt: skip
        self._run(
            str(binary), f"--etcd-servers=http://127.0.0.1:{etcd}", "--bind-address=127.0.0.1",
            f"--secure-port={port}", f"--tls-cert-file={made}", f"--tls-private-key-file={own}",
            "--authorization-mode=RBAC", "--allow-privileged=true",
            f"--token-auth-file={folder}/tokens.csv",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
            "--disable-admission-plugins=ServiceAccount", "--service-cluster-ip-range=10.0.0.0/24",
        )  # fmt: skip
        super().__init__(folder, ADMIN, port)
        poll(
            lambda: self.status("GET", "/api/v1/namespaces/default") == 200,
            lambda: self.log.read_text(errors="replace")[-2000:],
        )

    def install(self, objects: tuple[chart.Object, ...]) -> None:
        """The chart's rights and kinds; ``folder`` gets a token of its service account."""
        self.create("/api/v1/namespaces", "Namespace", "monitoring")
        for one in objects:
            if one["kind"] in FOLDERS:
                self.ask("POST", FOLDERS[one["kind"]], one)
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        asked["spec"] = {"audiences": ["https://kubernetes.default.svc"]}
        path = f"{FOLDERS['ServiceAccount']}/warpwatch-fleet/token"
        (self.folder / "token").write_text(self.ask("POST", path, asked)["status"]["token"])

    def close(self) -> None:
        super().close()
        for process in reversed(self._processes):
            process.terminate()
            process.wait(DEADLINE_S)

    def _run(self, *command: str) -> None:
        self._processes.append(logged(command, self.log, start_new_session=True))
