"""The daemon's side of the rendezvous, as far as the tests of the shim need it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from tests.client.fork_server import ROOT, Forked, ForkServer
from tests.daemon.ranks.ring_files import Holder
from tests.waiting import eventually
from warpwatch import protocol
from warpwatch.ring import RingWriter
from warpwatch_daemon.ranks.folder import CommandFiles
from warpwatch_runtime.directory import Directory


class Ring:
    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        self.name = path.stem
        self.size = len(data)
        self.header = protocol.decode_header(data[: protocol.HEADER_SIZE], len(data))
        self.records: list[protocol.RecordHead] = []
        self.torn = 0
        first = max(1, self.header.records - protocol.RECORD_COUNT + 2)
        for sequence in range(first, self.header.records + 1):
            offset = protocol.record_offset(sequence)
            try:
                record = protocol.decode_record(data[offset : offset + protocol.RECORD_SIZE])
            except protocol.ProtocolError:
                self.torn += 1
                continue
            assert record.sequence >= sequence
            # A newer one was written in its place while the file was read.
            if record.sequence == sequence:
                self.records.append(record)

    @property
    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.header.metadata_text or b"{}")
        return found

    def payloads(self, kind: int) -> list[bytes]:
        return [record.payload for record in self.records if record.type == kind]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(payload) for payload in self.payloads(protocol.RECORD_EVENT)]

    @property
    def steps(self) -> list[tuple[int, ...]]:
        """(number, duration ns, GPU ns, allocated, samples, tokens, *phases ns) and flags last."""
        found = []
        for record in self.records:
            if record.type == protocol.RECORD_STEP:
                words = memoryview(record.payload).cast("Q").tolist()
                found.append((*words, record.flags))
        return found

    @property
    def works(self) -> list[tuple[int, ...]]:
        """(tokens, prompt tokens, decoded requests, KV tokens) of each iteration."""
        payloads = self.payloads(protocol.RECORD_ITERATION)
        return [tuple(memoryview(payload).cast("Q").tolist()[5:9]) for payload in payloads]

    @property
    def seconds(self) -> list[Any]:
        """The words of each record of a server's second."""
        return [protocol.SERVE.unpack_from(one) for one in self.payloads(protocol.RECORD_SERVE)]

    @property
    def latencies(self) -> list[tuple[int, int, int]]:
        """(kind, bucket, number) of all seconds."""
        parts = [one[protocol.SERVE.size :] for one in self.payloads(protocol.RECORD_SERVE)]
        return [entry for part in parts for entry in protocol.BUCKET.iter_unpack(part)]

    def event_names(self) -> list[str]:
        return [str(event["event"]) for event in self.events]


def written(ring: RingWriter) -> list[protocol.RecordHead]:
    numbers = range(1, ring.words[protocol.WORD_RECORDS] + 1)
    offsets = (protocol.record_offset(number) for number in numbers)
    return [
        protocol.decode_record(bytes(ring._view[at : at + protocol.RECORD_SIZE])) for at in offsets
    ]


class Folder:
    """A rendezvous folder whose lock another process holds, like a daemon."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._commands = CommandFiles(Directory(path / "commands"))
        for name in ("ranks", "commands", "inbox"):
            (path / name).mkdir(parents=True)
        (path / "daemon.lock").touch()

    def environment(self, **more: str) -> dict[str, str]:
        named = {"WARPWATCH_DIR": str(self.path), "WARPWATCH_INBOX": str(self.path / "inbox")}
        kept = {key: value for key, value in os.environ.items() if not key.startswith("WARPWATCH")}
        return {**kept, **named, "WARPWATCH_ATTACH_INTERVAL_S": "0.02", **more}

    def held(self) -> closing[Holder]:
        return closing(Holder(self.path / "daemon.lock"))

    def silent_for(self, seconds: float) -> None:
        eventually(lambda: time.monotonic_ns() - self.ring().header.heartbeat_ns > seconds * 1e9)

    def rings(self) -> list[Ring]:
        return [Ring(path) for path in sorted((self.path / "ranks").glob("*.ring"))]

    def ring(self) -> Ring:
        (found,) = self.rings()
        return found

    def command(self, name: str, **command: Any) -> None:
        self._commands.prepare(name)
        self._commands.send(name, command)


@contextmanager
def program(
    folder: Folder,
    code: str,
    *arguments: str,
    python: str | ForkServer = sys.executable,
    **environ: str,
) -> Iterator[Forked | subprocess.Popen[str]]:
    """A process that runs ``code``; it is killed at the end if it still runs.

    ``python`` is an interpreter, or a server that forks one.
    """
    environment = {**folder.environment(**environ), "PYTHONPATH": str(ROOT / "client")}
    environment["PYTHONPATH"] += os.pathsep + environ.get("PYTHONPATH", "")
    process: Forked | subprocess.Popen[str]
    with ExitStack() as stack:
        if isinstance(python, ForkServer):
            process = python.fork(code, *arguments, environ=environment)
        else:
            process = stack.enter_context(
                subprocess.Popen(
                    [python, "-c", code, *arguments],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        stack.callback(process.kill)
        yield process
