"""A real S3 server for tests, behind a server that fails as networks and buckets do."""

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.exporters.receiver import Answer, http_server
from tests.processes import running
from tests.waiting import DEADLINE_S, eventually, is_listening
from warpwatch_daemon.demo.processes import free_port

BUCKET = "ours"
URL = f"s3://{BUCKET}/gpus"
_KEYS = ("accesskey123", "secretkey123456")


class Bucket:
    """Its objects are files below ``folder``.

    ``seen``: the requests, as ``PUT /bucket/key``. ``mode``: ``pass``; ``refuse``; ``silent``:
    takes all and never answers; a number: it answers with this status. ``denied``: 403 for
    names that contain this.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self._port = port
        self.mode: str | int = "pass"
        self.denied = ""
        self.seen: list[str] = []
        self._changed = threading.Event()
        self.environment = {
            **{"AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"},
            **{"AWS_ACCESS_KEY_ID": _KEYS[0], "AWS_SECRET_ACCESS_KEY": _KEYS[1]},
        }

    def set(self, mode: str | int) -> None:
        """Also for who is connected already."""
        self.mode = mode
        changed, self._changed = self._changed, threading.Event()
        changed.set()

    def objects(self) -> list[str]:
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in found)

    def answer(self, method: str, target: str, headers: Any, body: bytes) -> Answer:
        if self.mode != "refuse":
            self.seen.append(f"{method} {target}")
        if self.mode == "silent":
            self._changed.wait(DEADLINE_S)
        if self.mode in ("refuse", "silent"):
            return None
        if isinstance(self.mode, int):
            return self.mode, {}, b""
        if self.denied and self.denied in target:
            return 403, {}, b""
        return self._pass(method, target, headers, body)

    def _pass(self, method: str, target: str, headers: Any, body: bytes) -> Answer:
        server = HTTPConnection("127.0.0.1", self._port, timeout=DEADLINE_S)
        with closing(server):
            server.request(method, target, body, dict(headers))
            reply = server.getresponse()
            own = ("content-length", "transfer-encoding", "connection", "server", "date")
            said = {name: value for name, value in reply.headers.items() if name.lower() not in own}
            return reply.status, said, reply.read()


@contextmanager
def bucket(folder: Path) -> Iterator[Bucket]:
    pytest.importorskip("obstore")
    (folder / BUCKET).mkdir(parents=True)
    port = free_port()
    program = shutil.which("rclone", path=str(Path(sys.executable).parent)) or "rclone"
    command = [program, "serve", "s3", "--auth-key", ",".join(_KEYS), "--config", ""]
    command += ["--addr", f"127.0.0.1:{port}", "--vfs-cache-mode", "off", str(folder)]
    log = folder.parent / "rclone.log"
    with running(command, log):
        eventually(lambda: is_listening(port), log.read_text)
        found = Bucket(folder / BUCKET, port)
        with http_server(found.answer) as found.environment["AWS_ENDPOINT_URL"]:
            yield found
            found.set("pass")
