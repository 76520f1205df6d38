"""Who is at the other end of the Unix socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.http.conftest import TIMEOUT_S
from warpwatch_daemon.http.peer import Peer, _is_of_this_machine, identify

POD = "0b7c4f9e-3a2d-4c5e-8f1a-6d7e8f9a0b1c"
CONNECT = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
input()
"""
CGROUPS = {
    "in no pod": "0::/system.slice/sshd.service\n",
    "in a pod": f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/x.scope\n",
}


class Transport:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def get_extra_info(self, name: str) -> object:
        return self._connection if name == "socket" else None


@pytest.fixture
def listener(open_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(open_path / "api.sock"))
        (open_path / "api.sock").chmod(0o777)
        listening.listen()
        yield listening


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of others")
@pytest.mark.parametrize(
    ("uid", "expected"),
    [
        (0, Peer("uid 0", 0, privileged=True, on_socket=True)),
        (1234, Peer("uid 1234", 1234, on_socket=True)),
        # Whom the kernel cannot name: a process of another user namespace has this UID too.
        (65534, Peer("unknown user", on_socket=True)),
    ],
)
def test_the_kernel_says_whose_process_asks(listener, uid, expected):
    command = [sys.executable, "-c", CONNECT, listener.getsockname(), str(uid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        connection, _ = listener.accept()
        with connection:
            assert identify(Transport(connection)) == expected
        child.communicate(b"\n", timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("theirs", "ours", "is_ours"),
    [
        ("in no pod", "in no pod", True),
        ("in a pod", "in no pod", False),
        ("in a pod", "in a pod", True),
        (None, "in no pod", False),
    ],
)
def test_root_of_another_pod_or_of_an_invisible_process_is_not_root_here(
    tmp_path, theirs, ours, is_ours
):
    for pid, where in ((4242, theirs), (os.getpid(), ours)):
        if where is not None:
            (tmp_path / str(pid)).mkdir()
            (tmp_path / str(pid) / "cgroup").write_text(CGROUPS[where])
            (tmp_path / str(pid) / "comm").write_text("python\n")
    assert _is_of_this_machine(4242, tmp_path) is is_ours
    assert not _is_of_this_machine(0, tmp_path)
