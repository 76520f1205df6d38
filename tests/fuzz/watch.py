"""Runs a target's inputs one by one, and keeps what no input may do."""

import gc
import hashlib
import os
import random
import struct
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

# In processor time, as the machine may have other work.
MAX_INPUT_S = 1.0
# From the campaign's middle to its end: blocks of Python's allocator; resident bytes, of which
# atheris takes some for its corpus. Few inputs say nothing: caches fill.
MAX_BLOCKS_RATIO, MAX_BLOCKS, MAX_RSS_BYTES, MIN_INPUTS = 1.05, 5_000, 96 << 20, 2_000
MAX_FINDINGS = 20
# hypothesis takes no more than 8 KiB for an example.
EXAMPLE_BYTES = 4096
# The newest input, in a file that outlives the process: its number, its start (monotonic ns), its
# size; then its bytes.
NEWEST = "newest"
_HEAD = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Target:
    """``run`` raises for what is a finding, and for nothing else.

    seeds: inputs that are valid, or nearly; tokens: what the reader of the format looks for.
    """

    run: Callable[[bytes], Any]
    seeds: list[bytes]
    tokens: tuple[bytes, ...] = ()
    max_bytes: int = 4096


def json_tokens(words: bytes) -> tuple[bytes, ...]:
    """The words of a format, and what a reader of JSON may not expect."""
    numbers = (b"1e999", b"NaN", b"9" * 400)
    return (*words.split(), *numbers, b"null", b"[]", b"{}", b"[[[[", b"\\ud800", b"\\n", b"\xff")


def of_bytes(test: Any) -> Target:
    """A test of hypothesis, whose examples are made of an input's bytes."""

    def run(data: bytes) -> None:
        # An example that needs more bytes than there are would not be tried at all.
        more = random.Random(zlib.crc32(data)).randbytes(EXAMPLE_BYTES)
        test.hypothesis.fuzz_one_input(data + more)

    seeds = [bytes(range(first, first + 120)) for first in range(0, 130, 10)]
    return Target(run, seeds, max_bytes=600)


def newest(work: Path) -> tuple[int, float, bytes]:
    """The newest input's number, how long it has run in seconds, its bytes."""
    try:
        data = (work / NEWEST).read_bytes()
        number, begun_ns, size = _HEAD.unpack_from(data)
    except (OSError, struct.error):
        return 0, 0.0, b""
    return number, (time.monotonic_ns() - begun_ns) / 1e9, data[_HEAD.size : _HEAD.size + size]


class Findings:
    """The findings of one target: the input of each different one in a file, and a text."""

    def __init__(self, folder: Path, target: str) -> None:
        self._folder = folder
        self._target = target
        self.paths: list[str] = []

    def add(self, what: str, data: bytes, text: str) -> None:
        """``what``: by which two findings are the same."""
        name = f"{self._target}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"
        path = self._folder / f"{name}.bin"
        if str(path) not in self.paths and len(self.paths) < MAX_FINDINGS:
            self.paths.append(str(path))
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.with_suffix(".txt").write_text(text, errors="backslashreplace")


class Watch:
    """Called with each input, until its ``share`` is 1."""

    def __init__(
        self, target: Target, work: Path, findings: Findings, inputs: int, seconds: float
    ) -> None:
        self._run = target.run
        self._newest_fd = os.open(work / NEWEST, os.O_WRONLY | os.O_CREAT)
        self._findings = findings
        self._inputs = inputs
        self._seconds = seconds
        self._begun = time.monotonic()
        self._count = 0
        self._slowest_s = 0.0
        # Blocks and resident bytes at the middle.
        self._middle: tuple[int, int] | None = None

    def __call__(self, data: bytes) -> None:
        self._count += 1
        head = _HEAD.pack(self._count, time.monotonic_ns(), len(data))
        os.pwrite(self._newest_fd, head + data, 0)
        took_s = self._timed(data)
        if took_s > MAX_INPUT_S:
            # Once more: the first one may have imported what it needed.
            took_s = min(took_s, self._timed(data))
        self._slowest_s = max(took_s, self._slowest_s)
        if took_s > MAX_INPUT_S:
            self._findings.add("slow", data, f"took {took_s:.2f} s of processor time")
        if self._middle is None and self.share() >= 0.5:
            self._middle = _memory()

    def _timed(self, data: bytes) -> float:
        """Seconds of processor time."""
        begun = time.process_time()
        try:
            self._run(data)
        except Exception as error:
            self._findings.add(_origin(error), data, "".join(traceback.format_exception(error)))
        return time.process_time() - begun

    def share(self) -> float:
        """Return the share of the campaign that is over."""
        elapsed_s = time.monotonic() - self._begun
        return max(elapsed_s / self._seconds, self._count / self._inputs)

    def end(self) -> dict[str, Any]:
        """Return the result of the campaign, with the growth until now."""
        blocks, resident = _memory()
        blocks_before, resident_before = self._middle or (blocks, resident)
        grown_bytes = resident - resident_before
        text = f"blocks {blocks_before} -> {blocks}, resident bytes {grown_bytes:+}"
        grows = blocks > blocks_before * MAX_BLOCKS_RATIO + MAX_BLOCKS
        if self._count >= MIN_INPUTS and (grows or grown_bytes > MAX_RSS_BYTES):
            self._findings.add("growth", b"", text)
        return {
            "inputs": self._count, "seconds": round(time.monotonic() - self._begun, 1),
            "slowest_s": round(self._slowest_s, 3), "memory": text,
            "findings": self._findings.paths,
        }  # fmt: skip


def _memory() -> tuple[int, int]:
    gc.collect()
    return sys.getallocatedblocks(), psutil.Process().memory_info().rss


def _origin(error: Exception) -> str:
    """Return the type of an error and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " ".join([type(error).__name__, *(f"{f.filename}:{f.lineno}" for f in frames)])
