"""An S3 server for tests, which also does what networks and buckets do."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.waiting import DEADLINE_S

URL = "s3://ours/gpus"
_KEY_ID = "accesskey123"
_STARTED = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
_JOINED = b'<CompleteMultipartUploadResult><ETag>"1"</ETag></CompleteMultipartUploadResult>'


class Bucket(ThreadingHTTPServer):
    """Its objects are files below ``folder``.

    ``seen``: the requests, as ``PUT /bucket/key``. ``mode``: ``pass``; ``refuse``; ``silent``:
    takes all and never answers; ``cut``: takes so many bytes and hangs up; a number: it answers
    with this status. ``denied``: 403 for whatever has this in its name.
    """

    CUT_BYTES = 1000
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.mode: str | int = "pass"
        self.denied = ""
        self.seen: list[str] = []
        self.changed = threading.Event()
        self._parts: defaultdict[str, dict[int, bytes]] = defaultdict(dict)
        self.environment = {
            **{"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}"},
            **{"AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"},
            **{"AWS_ACCESS_KEY_ID": _KEY_ID, "AWS_SECRET_ACCESS_KEY": "secretkey123456"},
        }

    def set(self, mode: str | int) -> None:
        """Also for who is connected already."""
        self.mode = mode
        changed, self.changed = self.changed, threading.Event()
        changed.set()

    def objects(self) -> list[str]:
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in found)

    def carry_out(self, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        address = urlsplit(target)
        query = parse_qs(address.query, keep_blank_values=True)
        if "uploads" in query:
            return 200, _STARTED
        if "partNumber" in query:
            self._parts[address.path][int(query["partNumber"][0])] = body
            return 200, b""
        path = self.folder.joinpath(*unquote(address.path).split("/")[2:])
        if method == "GET":
            return (200, path.read_bytes()) if path.is_file() else (404, b"")
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = self._parts.pop(address.path, {})
        path.write_bytes(b"".join(parts[number] for number in sorted(parts)) or body)
        return 200, _JOINED if parts else b""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def do_PUT(self) -> None:
        server, mode = self.server, self.server.mode
        length = int(self.headers.get("content-length", 0))
        self.close_connection = mode != "pass"
        if mode == "refuse":
            return
        server.seen.append(f"{self.command} {self.path}")
        if mode == "cut" and length > server.CUT_BYTES:
            self.rfile.read(server.CUT_BYTES)
            return
        body = self.rfile.read(length)
        signed = f"Credential={_KEY_ID}/" in self.headers.get("authorization", "")
        if mode == "silent":
            server.changed.wait(DEADLINE_S)
        elif isinstance(mode, int):
            self._answer(mode)
        elif not signed or (server.denied and server.denied in self.path):
            self._answer(403)
        else:
            self._answer(*server.carry_out(self.command, self.path, body))

    do_GET = do_POST = do_PUT

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response_only(status)
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", self.date_time_string())
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def bucket(folder: Path) -> Iterator[Bucket]:
    pytest.importorskip("obstore")
    folder.mkdir()
    with Bucket(folder) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield found
        found.shutdown()
