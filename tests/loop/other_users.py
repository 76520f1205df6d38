"""Other users of the machine, as children that have given up root's rights before they ask."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.waiting import DEADLINE_S

OWNER, STRANGER = 1234, 1235
_BECOME = """
import contextlib, encodings.idna, os, socket, sys, time
uid = int(sys.argv[1])
os.setgroups([]), os.setgid(uid), os.setuid(uid)
"""
_ASK = (
    _BECOME
    + """
where, port = sys.argv[2], int(sys.argv[3])
if port:
    connection = socket.create_connection((where, port), 300)
else:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(300)
    connection.connect(where)
connection.sendall(sys.stdin.buffer.read())
while part := connection.recv(65536):
    sys.stdout.buffer.write(part)
"""
)
# Sixteen pages asked for at once by some, nothing by the others, and nothing is ever read; from the
# beginning each few seconds.
_HOLD = (
    _BECOME
    + """
asked = b"GET /metrics HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n" * 16
while True:
    held = []
    for number in range(int(sys.argv[3])):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        held.append(connection)
        with contextlib.suppress(ConnectionError):
            connection.connect(("127.0.0.1", int(sys.argv[2])))
            connection.sendall(asked if number < 32 else b"")
    print("held", flush=True)
    time.sleep(10)
"""
)
_COMMAND = """
import encodings.idna, http.client, os, sys
from concurrent.futures import thread
from warpwatch_daemon import api_client
from warpwatch_runtime import quantities
from warpwatch_daemon.cli import capture, main, status
uid = int(sys.argv[1])
os.setgroups([]), os.setgid(uid), os.setuid(uid)
sys.exit({"capture": capture, "status": status}[sys.argv[2]].main(sys.argv[3:]))
"""


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """Other users come to it, as to /run.

    Each run of pytest closes its own folder to other users when it starts.
    """
    with tempfile.TemporaryDirectory(
        prefix="warpwatch-test-", ignore_cleanup_errors=True
    ) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def request(
    uid: int, where: Path | int, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    """Return the status and body that a user gets. ``where``: Unix socket, or port on loopback."""
    content = b"" if body is None else json.dumps(body).encode()
    lines = {"Host": "localhost", "Connection": "close", "Content-Length": str(len(content))}
    lines |= {"Content-Type": "application/json"} if content else {}
    head = "".join(f"{name}: {value}\r\n" for name, value in (lines | (headers or {})).items())
    method = "POST" if content else "GET"
    target = ["127.0.0.1", str(where)] if isinstance(where, int) else [str(where), "0"]
    done = subprocess.run(
        [sys.executable, "-c", _ASK, str(uid), *target],
        input=f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content, capture_output=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    answer, _, text = done.stdout.decode().partition("\r\n\r\n")
    return int(answer.split()[1]), text


@contextlib.contextmanager
def held_connections(uid: int, port: int, count: int) -> Iterator[None]:
    """So many connections of this user that ask and never read."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(uid), str(port), str(count)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout.readline() == b"held\n"
        yield
        process.kill()


def command(uid: int, run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`warpwatch …` as this user, told only where the daemon is."""
    return subprocess.run(
        [sys.executable, "-c", _COMMAND, str(uid), *arguments], env={"WARPWATCH_DIR": str(run_dir)},
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
