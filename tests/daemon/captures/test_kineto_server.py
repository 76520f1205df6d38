"""The socket: real datagrams, honest and hostile."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from warpwatch_daemon.captures.kineto import protocol
from warpwatch_daemon.captures.kineto.pollers import Pollers, Sender
from warpwatch_daemon.captures.kineto.process_facts import ProcessFacts
from warpwatch_daemon.captures.kineto.protocol import TraceConfig
from warpwatch_daemon.captures.kineto.server import MAX_FOLDER_BYTES, KinetoServer

UUID = "537fcb41-df4d-4443-b4a9-3570061ca5de"


class Served:
    """A server whose rounds the test runs itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rejected: Counter[str] = Counter()
        self.processes = Pollers(lambda sender: ProcessFacts("job", sender.pid, 1))
        self.server = KinetoServer(folder, self.processes, self._reject)

    def _reject(self, reason: str) -> None:
        self.rejected[reason] += 1

    def client(self, number: int = 0) -> socket.socket:
        """Bound as libkineto binds."""
        name = self.folder / f"dynoconfigclient{UUID[:-2]}{number:02}"
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        opened.bind(str(name))
        opened.settimeout(5)
        return opened

    def send(self, client: socket.socket, data: bytes) -> None:
        client.sendto(data, str(self.folder / "dynolog"))

    def close(self) -> None:
        self.server.stop()
        self.server.close()


def poll_message(pid: int = 0, wants: int = 3) -> bytes:
    pids = (pid or os.getpid(), 1)
    return protocol.message(b"req", struct.pack("<iiq2i", wants, len(pids), 0, *pids))


@pytest.fixture
def served() -> Iterator[Served]:
    # Paths of sockets are short, and those of pytest's own folders are not.
    with tempfile.TemporaryDirectory(prefix="ww") as folder:
        served = Served(Path(folder))
        yield served
        served.close()


def test_polls_and_registrations_are_answered(served: Served) -> None:
    with served.client() as client:
        served.send(client, protocol.message(b"ctxt", struct.pack("<iiq", 0, os.getpid(), 0)))
        served.send(client, poll_message())
        served.server.serve()
        answer, _, _, sender = client.recvmsg(4096)
        assert answer == protocol.registered(1)
        # From another folder it would be the end of the process.
        assert sender.startswith(f"{served.folder}/dynolog")
        assert client.recv(4096) == protocol.configuration("")
        ((_, members),) = served.processes.jobs().items()
        (process,) = members.values()
        # As the kernel says, not as the message does.
        assert (process.sender.pid, process.sender.uid) == (os.getpid(), os.getuid())
        assert process.has_gpu
    assert served.rejected == {}


def test_an_order_goes_to_the_one_who_polls(served: Served) -> None:
    with served.client(1) as one, served.client(2) as two:
        for client in (one, two):
            served.send(client, poll_message())
        served.server.serve()
        config = TraceConfig("/inbox/a.json", time.time() + 60, 1.0)
        served.processes.give({Path(one.getsockname()).name: config})
        for client in (one, two):
            client.recv(4096)
            served.send(client, poll_message())
        served.server.serve()
        assert one.recv(4096) == protocol.configuration(config.text())
        assert two.recv(4096) == protocol.configuration("")


def test_a_client_that_never_reads_stalls_no_one(served: Served) -> None:
    with served.client(1) as deaf, served.client(2) as client:
        # Its queue fills up with answers; how much it holds is the kernel's (max_dgram_qlen).
        for _ in range(5000):
            served.send(deaf, poll_message())
            served.server.serve()
            if served.rejected["unreachable"]:
                break
        assert served.rejected["unreachable"] == 1
        served.send(client, poll_message())
        served.server.serve()
        assert client.recv(4096) == protocol.configuration("")


def test_who_dies_with_a_full_queue_is_forgotten_at_once(served: Served) -> None:
    with served.client(1) as deaf:
        while not served.rejected["unreachable"]:
            served.send(deaf, poll_message())
            served.server.serve()
        left = Path(deaf.getsockname())
        assert len(served.processes.names()) == 1
        served.send(deaf, poll_message())
    served.server.serve()
    deadline = time.monotonic() + 60
    while served.processes.names() and time.monotonic() < deadline:
        served.server.serve()
    assert served.processes.names() == set()
    assert not left.exists()


def test_sockets_that_dead_processes_left_are_removed(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ww") as name:
        folder = Path(name)
        for path in (folder / f"dynoconfigclient{UUID}", folder / "not-ours", folder / "dynolog"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
                dead.bind(str(path))
        served = Served(folder)
        with served.client(7) as client:
            served.send(client, poll_message())
            served.server.serve()
        served.server.serve()
        assert sorted(path.name for path in folder.iterdir()) == ["dynolog", "not-ours"]
        served.close()


def test_a_daemon_that_ends_leaves_a_link_to_nowhere_and_the_next_one_replaces_it() -> None:
    with tempfile.TemporaryDirectory(prefix="ww") as name:
        path = Path(name) / "dynolog"
        for _ in range(2):
            served = Served(Path(name))
            assert path.is_socket()
            served.close()
            # Not a refused connection, at which libkineto would try again for seconds.
            client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            with client, pytest.raises(FileNotFoundError):
                client.sendto(poll_message(), str(path))


def test_a_folder_in_a_sockets_place_stops_no_housekeeping(served: Served) -> None:
    (served.folder / "dynoconfigclient-x").mkdir()
    with served.client(1) as client, served.client(2) as living:
        for polling in (client, living):
            served.send(polling, poll_message())
        swapped = Path(client.getsockname())
        swapped.unlink()
        swapped.mkdir()
        left = served.folder / f"dynoconfigclient{UUID}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
            dead.bind(str(left))
        served.processes.register(Sender(swapped.name, 1, os.getuid()))
        # Answers, forgets what is not there any more and sweeps.
        served.server.serve()
        assert served.processes.names() == {Path(living.getsockname()).name}
        assert not left.exists()


def test_everyone_may_write_to_the_socket(served: Served) -> None:
    assert (served.folder / "dynolog").stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize(
    "data",
    [b"", b"x", b"\0" * 40, b"\xff" * 60_000, poll_message()[:-1]],
    ids=["empty", "short", "zeros", "ones", "cut"],
)
def test_nonsense_is_counted_and_not_answered(served: Served, data: bytes) -> None:
    with served.client() as client:
        served.send(client, data)
        served.server.serve()
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(4096)
    assert served.rejected == {"bad_message": 1}


def test_a_sender_without_a_name_of_libkineto_is_refused(served: Served, tmp_path: Path) -> None:
    for name in ("", "dynolog2", "dynoconfigclient"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            if name:
                client.bind(str(served.folder / name))
            client.sendto(poll_message(), str(served.folder / "dynolog"))
            served.server.serve()
    assert served.rejected == {"no_address": 3}


def test_who_has_the_folder_under_another_name_is_left_alone(
    served: Served, tmp_path: Path
) -> None:
    alias = Path(f"{served.folder}-alias")
    alias.symlink_to(served.folder)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.bind(f"{alias}/dynoconfigclient{UUID}")
            served.send(client, poll_message())
            served.server.serve()
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(4096)
    finally:
        alias.unlink()
    assert served.rejected == {"other_path": 1}


def test_an_answer_follows_no_link(served: Served) -> None:
    with served.client(1) as client, served.client(2) as victim:
        served.send(client, poll_message())
        path = Path(client.getsockname())
        path.unlink()
        path.symlink_to(victim.getsockname())
        served.server.serve()
        victim.setblocking(False)
        with pytest.raises(BlockingIOError):
            victim.recv(4096)
    # Links are not followed: what lies there is no socket.
    assert served.rejected == {"not_the_owner": 1}


def test_descriptors_that_come_along_are_not_taken(served: Served) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with served.client() as client:
        opened = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("3i", 0, 1, 2))
            client.sendmsg([poll_message()], [rights], 0, str(served.folder / "dynolog"))
        served.server.serve()
        assert len(os.listdir("/proc/self/fd")) == opened
        assert client.recv(4096) == protocol.configuration("")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_flood_is_served_in_batches(served: Served) -> None:
    stop = threading.Event()

    def flood() -> None:
        with served.client() as client:
            client.setblocking(False)
            while not stop.is_set():
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    served.send(client, b"flood")

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        while served.rejected["bad_message"] < 200:
            # Comes back although there is always more.
            before = served.rejected["bad_message"]
            served.server.serve()
            assert served.rejected["bad_message"] - before <= 64
    finally:
        stop.set()
        thread.join()


def test_stop_wakes_the_loop_that_sleeps(served: Served) -> None:

    def loop() -> None:
        for _ in range(1000):
            served.server.serve()

    thread = threading.Thread(target=loop)
    thread.start()
    served.server.stop()
    thread.join(30)
    assert not thread.is_alive()


def test_a_folder_that_libkineto_could_not_name_has_no_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * MAX_FOLDER_BYTES)
    folder.mkdir()
    with pytest.raises(OSError, match="longer than the 54 bytes"):
        Served(folder)
    assert list(folder.iterdir()) == []
