"""A real node for tests: etcd, kube-apiserver, containerd and a kubelet, all on loopback.

For Kubernetes 1.20, as root, with cgroup version 1, on a machine that is no one's node: the
kubelet works in /var/lib/kubelet. Pods use the host's network, as there is no CNI.
"""

import hashlib
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx

from tests.processes import logged
from tests.waiting import DEADLINE_S, eventually

NODE = "warpwatch-test"
KUBELET_FOLDER = Path("/var/lib/kubelet")
_SERVER = "https://127.0.0.1:16443"
_TOKEN = "warpwatch-test"
_PLUGINS = KUBELET_FOLDER / "device-plugins"
_ENDPOINT = "warpwatch-test.sock"
_CONFIGURATIONS = Path(__file__).parent
_IMAGE = "localhost/pause:1"
_PAUSE = "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n"
# Made by the kubelet and by containerd's shims, wherever they are configured to work.
_FOLDERS = (KUBELET_FOLDER, *map(Path, ("/var/log/pods", "/var/log/containers", "/run/containerd")))
# A kubelet sets these as it likes them: the manager of containers in its start.
_SETTINGS = [
    Path("/proc/sys", name)
    for name in (
        "vm/overcommit_memory",
        "vm/panic_on_oom",
        "kernel/panic",
        "kernel/panic_on_oops",
        "kernel/keys/root_maxkeys",
        "kernel/keys/root_maxbytes",
    )
]


class KubernetesNode:
    """``binaries`` has kubelet and kube-apiserver; ``logs`` gets what each program writes."""

    def __init__(self, binaries: Path, work: Path, logs: Path) -> None:
        self.api = KubernetesApi()
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
        eventually((_PLUGINS / "kubelet.sock").exists)
        eventually(self.api.has_node)

    def stop(self) -> None:
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
            f"--pod-infra-container-image={_IMAGE}",
            f"--container-runtime-endpoint=unix://{self._work}/containerd.sock",
        )

    def stop_kubelet(self) -> None:
        assert self._kubelet is not None
        _end(self._kubelet)

    @contextmanager
    def api_held(self) -> Iterator[None]:
        self._api_server.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._api_server.send_signal(signal.SIGCONT)

    def pid_of(self, container_id: str) -> int:
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
        # In a session of its own: an interrupt from the terminal is for the tests alone.
        process = logged(command, log, start_new_session=True)
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


@contextmanager
def traces_removed(work: Path) -> Iterator[None]:
    """Afterwards nothing is mounted in ``work`` or the kubelet's folder, and all is as it was."""
    folders = [folder for folder in _FOLDERS if not folder.exists()]
    settings = {path: path.read_text() for path in _SETTINGS}
    try:
        yield
    finally:
        _unmount(KUBELET_FOLDER, work)
        _remove_control_groups()
        for path, text in settings.items():
            if path.read_text() != text:
                path.write_text(text)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _unmount(*folders: Path) -> None:
    """And all below; the newest first, as mounts may lie on each other."""
    mounted = [Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines()]
    for path in reversed(mounted):
        if any(path.is_relative_to(folder) for folder in folders):
            subprocess.run(["umount", str(path)], check=True)


def _remove_control_groups() -> None:
    for root in Path("/sys/fs/cgroup").glob("*/kubepods"):
        for folder, _, _ in os.walk(root, topdown=False):
            with suppress(FileNotFoundError):
                os.rmdir(folder)


class KubernetesApi:
    """The requests of tests to the API server. Pods get to the node without a scheduler."""

    def __init__(self) -> None:
        self.server = _SERVER
        # The server made its certificate itself.
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {_TOKEN}"}, verify=False, timeout=DEADLINE_S
        )

    def answers(self, path: str) -> bool:
        try:
            self._ask("GET", path)
        except httpx.HTTPError:
            return False
        return True

    def has_node(self) -> bool:
        return self.answers(f"nodes/{NODE}")

    def allocatable(self, resource: str) -> int:
        node = self._ask("GET", f"nodes/{NODE}")
        return int(node["status"].get("allocatable", {}).get(resource, 0))

    def create_namespace(self, name: str) -> None:
        self._ask("POST", "namespaces", {"metadata": {"name": name}})

    def create_pod(self, namespace: str, name: str, limits: dict[str, str]) -> str:
        """Create a pod with an idle container ``main``; return its UID."""
        pod = json.loads((_CONFIGURATIONS / "pod.json").read_text())
        pod["metadata"]["name"] = name
        pod["spec"]["containers"][0]["resources"]["limits"].update(limits)
        created = self._ask("POST", f"namespaces/{namespace}/pods", pod)
        return str(created["metadata"]["uid"])

    def delete_pod(self, namespace: str, name: str) -> None:
        self._ask("DELETE", f"namespaces/{namespace}/pods/{name}")

    def phase(self, namespace: str, name: str) -> str:
        return str(self._pod(namespace, name)["status"].get("phase"))

    def container_id(self, namespace: str, name: str) -> str:
        """Wait until the pod's only container runs."""
        (status,) = self._pod(namespace, name)["status"]["containerStatuses"]
        return str(status["containerID"]).rpartition("/")[2]

    def _pod(self, namespace: str, name: str) -> Any:
        return self._ask("GET", f"namespaces/{namespace}/pods/{name}")

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._http.request(method, f"{self.server}/api/v1/{path}", json=body)
        return answer.raise_for_status().json()


def write_pause_image(folder: Path) -> Path:
    """The image as `docker save` writes it; needs a C compiler that can link statically."""
    layer = _layer_with(_program(folder))
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [_IMAGE], "Layers": ["layer.tar"]}]
    path = folder / "pause.tar"
    with tarfile.open(path, "w") as archive:
        _add(archive, "config.json", json.dumps(config).encode())
        _add(archive, "layer.tar", layer)
        _add(archive, "manifest.json", json.dumps(manifest).encode())
    return path


def _program(folder: Path) -> Path:
    source, program = folder / "pause.c", folder / "pause"
    source.write_text(_PAUSE)
    subprocess.run(["cc", "-static", "-o", str(program), str(source)], check=True)
    return program


def _layer_with(program: Path) -> bytes:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        archive.add(program, "pause")
    return layer.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def messages(folder: Path) -> Any:
    """The module made of device_plugin.proto, generated in ``folder``."""
    proto = _CONFIGURATIONS / "device_plugin.proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(proto.parent)]
    subprocess.run([*command, f"--python_out={folder}", str(proto)], check=True)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("device_plugin_pb2")
    finally:
        sys.path.remove(str(folder))


class DevicePlugin:
    """A device plugin that offers GPUs that do not exist to a real kubelet."""

    def __init__(self, folder: Path, resource: str, ids: Sequence[str]) -> None:
        self._pb = messages(folder)
        self._resource = resource
        self._ids = ids
        self._ended = threading.Event()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((self._handlers(),))

    def start(self) -> None:
        """Serves and registers; raises grpc.RpcError while the kubelet is not ready for it."""
        (_PLUGINS / _ENDPOINT).unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix:{_PLUGINS / _ENDPOINT}")
        self._server.start()
        request = self._pb.RegisterRequest(
            version="v1beta1", endpoint=_ENDPOINT, resource_name=self._resource
        )
        options = [("grpc.default_authority", "localhost")]
        with grpc.insecure_channel(f"unix:{_PLUGINS / 'kubelet.sock'}", options) as channel:
            register = channel.unary_unary(
                "/v1beta1.Registration/Register",
                request_serializer=self._pb.RegisterRequest.SerializeToString,
                response_deserializer=self._pb.Empty.FromString,
            )
            register(request, timeout=DEADLINE_S, wait_for_ready=True)

    def stop(self) -> None:
        self._ended.set()
        self._server.stop(0).wait()

    def _handlers(self) -> Any:
        pb = self._pb
        methods = {
            "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(
                lambda request, context: pb.DevicePluginOptions(),
                pb.Empty.FromString,
                pb.DevicePluginOptions.SerializeToString,
            ),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list, pb.Empty.FromString, pb.ListAndWatchResponse.SerializeToString
            ),
            "Allocate": grpc.unary_unary_rpc_method_handler(
                self._allocate, pb.AllocateRequest.FromString, pb.AllocateResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", methods)

    def _list(self, request: Any, context: Any) -> Iterator[Any]:
        devices = [self._pb.Device(ID=text, health="Healthy") for text in self._ids]
        yield self._pb.ListAndWatchResponse(devices=devices)
        while context.is_active() and not self._ended.wait(1):
            pass

    def _allocate(self, request: Any, context: Any) -> Any:
        responses = [
            self._pb.ContainerAllocateResponse(
                envs={"NVIDIA_VISIBLE_DEVICES": ",".join(container.devices_ids)}
            )
            for container in request.container_requests
        ]
        return self._pb.AllocateResponse(container_responses=responses)
