"""A real node for tests: etcd, kube-apiserver, containerd and a kubelet, all on loopback.

For Kubernetes 1.20, as root, with cgroup version 1, on a machine that is no one's node: the
kubelet works in /var/lib/kubelet. Pods use the host's network, as there is no CNI.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.devices.attribution.kubernetes_api import KubernetesApi
from tests.devices.attribution.node_traces import KUBELET_FOLDER, traces_removed
from tests.devices.attribution.pause_image import IMAGE, write_pause_image
from tests.waiting import eventually

NODE = "warpwatch-test"
_SERVER = "https://127.0.0.1:16443"
_TOKEN = "warpwatch-test"
_PLUGINS_SOCKET = KUBELET_FOLDER / "device-plugins/kubelet.sock"
_CONFIGURATIONS = Path(__file__).parent


class KubernetesNode:
    """``binaries`` has kubelet and kube-apiserver; ``logs`` gets what each program writes."""

    def __init__(self, binaries: Path, work: Path, logs: Path) -> None:
        self.api = KubernetesApi(_SERVER, _TOKEN, NODE)
        self._binaries = binaries
        self._work = work
        self._logs = logs
        self._kubelet: subprocess.Popen[bytes] | None = None
        self._api_server: subprocess.Popen[bytes] | None = None
        self._undo = ExitStack()

    def start(self) -> None:
        """Until device plugins may register.

        Raises AssertionError when a part does not come up; ``stop`` is needed even then.
        """
        self._undo.enter_context(traces_removed(self._work))
        self._start_control_plane()
        self._start_containerd()
        self.start_kubelet()
        eventually(_PLUGINS_SOCKET.exists)
        eventually(self.api.has_node)

    def stop(self) -> None:
        """Ends all programs and containers and takes away what they left on the machine."""
        self._undo.close()

    def start_kubelet(self) -> None:
        """Also after ``stop_kubelet``; does not wait for it."""
        (self._work / "kubelet.json").write_text(json.dumps(self._kubelet_configuration()))
        shutil.copy(_CONFIGURATIONS / "kubeconfig.json", self._work)
        self._kubelet = self._run(
            f"{self._binaries}/kubelet",
            f"--config={self._work}/kubelet.json",
            f"--kubeconfig={self._work}/kubeconfig.json",
            f"--hostname-override={NODE}",
            "--container-runtime=remote",
            f"--pod-infra-container-image={IMAGE}",
            f"--container-runtime-endpoint=unix://{self._work}/containerd.sock",
        )

    def stop_kubelet(self) -> None:
        """Its containers go on."""
        assert self._kubelet is not None
        _end(self._kubelet)

    @contextmanager
    def api_held(self) -> Iterator[None]:
        """Meanwhile the API server answers no one."""
        assert self._api_server is not None
        self._api_server.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._api_server.send_signal(signal.SIGCONT)

    def pid_of(self, container_id: str) -> int:
        """On the host, of the first process of a container."""
        lines = self._ctr("tasks", "list").splitlines()[1:]
        (pid,) = [int(line.split()[1]) for line in lines if line.startswith(container_id)]
        return pid

    def _start_control_plane(self) -> None:
        work = self._work
        key = work / "service-account.pem"
        subprocess.run(
            ["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True
        )
        (work / "tokens.csv").write_text(f"{_TOKEN},admin,admin,system:masters\n")
        self._run("etcd", *self._flags("etcd"))
        server = f"{self._binaries}/kube-apiserver"
        self._api_server = self._run(server, *self._flags("kube-apiserver"))
        eventually(lambda: self.api.answers("namespaces/default"))

    def _flags(self, program: str) -> list[str]:
        text = (_CONFIGURATIONS / f"{program}.flags").read_text()
        return text.format(work=self._work, token=_TOKEN).split()

    def _start_containerd(self) -> None:
        config = self._work / "containerd.toml"
        text = (_CONFIGURATIONS / "containerd.toml").read_text()
        config.write_text(text.format(work=self._work))
        self._run("containerd", "--config", str(config))
        self._undo.callback(self._end_containers)
        eventually((self._work / "containerd.sock").exists)
        self._ctr("images", "import", str(write_pause_image(self._work)))

    def _end_containers(self) -> None:
        eventually(self._has_no_task)

    def _has_no_task(self) -> bool:
        """Ends those that there are; containerd may be quicker, as it ends pods as a whole."""
        tasks = self._ctr("tasks", "list", "--quiet").split()
        for task in tasks:
            self._ctr("tasks", "delete", "--force", task, check=False)
        return not tasks

    def _kubelet_configuration(self) -> dict[str, Any]:
        known: dict[str, Any] = json.loads((_CONFIGURATIONS / "kubelet.json").read_text())
        return known | {"volumePluginDir": str(self._work / "volume-plugins")}

    def _ctr(self, *arguments: str, check: bool = True) -> str:
        command = ["ctr", "--address", str(self._work / "containerd.sock"), "-n", "k8s.io"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=check)
        return done.stdout

    def _run(self, *command: str) -> subprocess.Popen[bytes]:
        log = self._logs / f"{Path(command[0]).name}.log"
        with open(log, "ab") as output:
            # In a session of its own: an interrupt from the terminal is for the tests alone.
            process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True
            )
        self._undo.callback(_end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Also if it has ended; kills what does not end by itself."""
    process.terminate()
    try:
        process.wait(120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
