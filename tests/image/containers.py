"""The image, built from a base that is made here, and containers of it.

Needs root, debootstrap, buildah, podman and runc; no registry of images is asked.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
BASE = "localhost/warpwatch-test-base"
IMAGE = "localhost/warpwatch-test"
PROGRAMS = ("debootstrap", "buildah", "podman", "runc", "nsenter")
_BUILD_TIMEOUT_S = 1800.0
# Return the arguments with which a build reaches a package index.
_SHARED = ("/etc/ssl/certs/ca-certificates.crt", "/etc/hosts", "/etc/resolv.conf", "/etc/pip.conf")
# runc: crun refuses mixed control groups. The limits: the usual ones may be more than is allowed.
RUN = [
    "podman", "run", "--runtime", "runc", "--cgroup-manager", "cgroupfs",
    "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024",
]  # fmt: skip
# The restrictions of every container of the project.
CONFINED = [
    "--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges", "--network", "none",
]  # fmt: skip
_FETCH = """
import sys, urllib.error, urllib.request
path, body, *headers = sys.argv[1:]
request = urllib.request.Request("http://127.0.0.1:9400" + path, body.encode() or None)
for header in headers:
    request.add_header(*header.split(": "))
try:
    answer = urllib.request.urlopen(request, timeout=300)
except urllib.error.HTTPError as error:
    answer = error
print(answer.status)
sys.stdout.write(answer.read().decode())
"""
# In the container: only there the daemon sees who asks on its socket.
_GET = """
import json, os, sys
from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.api_client import find_socket
client = ApiClient(socket_path=find_socket(os.environ, os.getuid()))
print(json.dumps(client.get(sys.argv[1])))
"""


def call(*command: str, timeout_s: float = DEADLINE_S, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def make_base() -> None:
    """Debian with Python, as this machine's own sources have it; kept for the next time."""
    if subprocess.run(["podman", "image", "exists", BASE]).returncode == 0:
        return
    targets = call("apt-get", "indextargets", "--format", "$(SITE) $(CODENAME)").split("\n")
    site, codename = targets[0].split()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        packages = "--include=python3,python3-venv,ca-certificates"
        command = ("debootstrap", "--variant=minbase", packages, codename, f"{folder}/root", site)
        call(*command, timeout_s=_BUILD_TIMEOUT_S)
        call("tar", "-C", f"{folder}/root", "-cf", f"{folder}/root.tar", ".")
        call("podman", "import", "--quiet", f"{folder}/root.tar", BASE)


def build() -> None:
    # Else the one before would stay without a name.
    call("podman", "rmi", "--force", IMAGE, check=False)
    shared = [path for path in _SHARED if Path(path).exists()]
    mounts = [part for path in shared for part in ("--volume", f"{path}:{path}:ro")]
    command = ["buildah", "build", "--quiet", "--isolation", "chroot", "--network", "host"]
    command += ["--pull-never", "--format", "docker", "--build-arg", f"BASE_IMAGE={BASE}", *mounts]
    call(*command, "--tag", IMAGE, str(ROOT), timeout_s=_BUILD_TIMEOUT_S)


def inspect(what: str, name: str) -> Any:
    (about,) = json.loads(call("podman", what, "inspect", name))
    return about


class Container:
    """Runs until ``remove``. ``options`` are podman's, ``arguments`` the image's."""

    def __init__(self, options: Sequence[str], arguments: Sequence[str] = ()) -> None:
        self.id = call(*RUN, "--detach", "--no-healthcheck", *options, IMAGE, *arguments).strip()

    @property
    def running(self) -> bool:
        return bool(inspect("container", self.id)["State"]["Running"])

    def log(self) -> str:
        done = subprocess.run(["podman", "logs", self.id], capture_output=True, text=True)
        return done.stdout + done.stderr

    def wait(self) -> int:
        return int(call("podman", "wait", self.id))

    def execute(self, *command: str) -> str:
        return call("podman", "exec", self.id, *command)

    def fetch(self, path: str, body: str = "", *headers: str) -> tuple[int, str]:
        """Status and text of the daemon's answer, over its own loopback: it has nothing else."""
        pid = inspect("container", self.id)["State"]["Pid"]
        command = ["nsenter", f"--net=/proc/{pid}/ns/net", sys.executable, "-c", _FETCH]
        answer = call(*command, path, body, *headers)
        status, _, text = answer.partition("\n")
        return int(status), text

    def get(self, path: str) -> Any:
        """The JSON answer on the Unix socket, to the daemon's own user: it needs no token."""
        return json.loads(self.execute("python3", "-c", _GET, path))

    def answers(self) -> bool:
        assert self.running, self.log()
        try:
            return self.fetch("/healthz")[0] == 200
        except AssertionError:
            return False

    def remove(self) -> None:
        call("podman", "rm", "--force", "--volumes", "--time", "2", self.id, check=False)
