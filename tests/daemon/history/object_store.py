"""An S3 server for tests, which also does what networks and buckets do."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.exporters.receiver import Answer, http_server
from tests.waiting import DEADLINE_S

URL = "s3://ours/gpus"
_KEY_ID = "accesskey123"
_STARTED = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
_JOINED = b'<CompleteMultipartUploadResult><ETag>"1"</ETag></CompleteMultipartUploadResult>'


class Bucket:
    """Its objects are files below ``folder``.

    ``seen``: the requests, as ``PUT /bucket/key``. ``mode``: ``pass``; ``refuse``; ``silent``:
    takes all and never answers; a number: it answers with this status. ``denied``: 403 for
    whatever has this in its name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mode: str | int = "pass"
        self.denied = ""
        self.seen: list[str] = []
        self._changed = threading.Event()
        self._parts: defaultdict[str, dict[int, bytes]] = defaultdict(dict)
        self.environment = {
            **{"AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"},
            **{"AWS_ACCESS_KEY_ID": _KEY_ID, "AWS_SECRET_ACCESS_KEY": "secretkey123456"},
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
        signed = f"Credential={_KEY_ID}/" in headers.get("authorization", "")
        if not signed or (self.denied and self.denied in target):
            return 403, {}, b""
        status, content = self._carry_out(method, target, body)
        return status, {"ETag": '"1"', "Last-Modified": formatdate(usegmt=True)}, content

    def _carry_out(self, method: str, target: str, body: bytes) -> tuple[int, bytes]:
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


@contextmanager
def bucket(folder: Path) -> Iterator[Bucket]:
    pytest.importorskip("obstore")
    folder.mkdir()
    found = Bucket(folder)
    with http_server(found.answer) as found.environment["AWS_ENDPOINT_URL"]:
        yield found
        found.set("pass")
