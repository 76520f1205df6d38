"""A process that is killed at any time while it writes: what it had finished is there."""

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.daemon.http.conftest import CAPTURE, STRAGGLER
from warpwatch_capturing.config import StoreConfig
from warpwatch_capturing.store import Store
from warpwatch_daemon.history.archive import HistoryStore
from warpwatch_exporters.jsonl import JsonlWriter
from warpwatch_runtime.files import StateFile
from warpwatch_telemetry.log import Decoder
from warpwatch_telemetry.records import Clock

Write = Callable[[int], object]


def state(folder: Path, packed: bool) -> tuple[Write, Callable[[], int]]:
    # A state larger than a page is written in several calls.
    file: StateFile[tuple[int, str]] = StateFile(
        folder / "state", tuple[int, str], 2**20, is_packed=packed
    )
    return (
        lambda number: file.write(file.encode((number, os.urandom(50_000).hex()))),
        lambda: (file.read() or (-1, ""))[0],
    )


def history(folder: Path) -> tuple[Write, Callable[[], int]]:
    def fail(what: str) -> None:
        raise AssertionError(what)

    store = HistoryStore(folder, 1e12, fail)
    return (
        lambda number: store.write([(replace(STRAGGLER, id=str(number)), None)], STRAGGLER.time),
        lambda: max((int(one.id) for one in store.newest(10**6)), default=-1),
    )


def log(folder: Path) -> tuple[Write, Callable[[], int]]:
    path = folder / "log.jsonl"
    writer = JsonlWriter(path)

    def newest() -> int:
        found = [-1]
        for line in path.read_bytes().splitlines():
            # A line that was half written when its process was killed is ended by the next one.
            with contextlib.suppress(ValueError):
                found.append(int(Decoder().decode_line(line).time))
        return found[-1]

    return lambda number: writer.write([Clock(float(number))]), newest


def captures(folder: Path) -> tuple[Write, Callable[[], int]]:
    store = Store(StoreConfig(url=f"file://{folder}"))

    def write(number: int) -> None:
        name = f"20260921T150000-{number:06x}"
        path = str(store.folder(name, CAPTURE.time))
        store.create(replace(CAPTURE, id=name, folder=path, detail="x" * 20_000))

    def newest() -> int:
        return max((int(one.id[-6:], 16) for one in store.load(0)), default=-1)

    return write, newest


WRITERS: dict[str, Callable[[Path], tuple[Write, Callable[[], int]]]] = {
    "a state": lambda folder: state(folder, packed=False),
    "a packed state": lambda folder: state(folder, packed=True),
    "the history": history,
    "the telemetry log": log,
    "the store of captures": captures,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_what_a_killed_process_had_written_is_there_and_the_next_one_goes_on(kind, tmp_path):
    newest = -1
    for count in (1, 2, 3, 5, 8, 13, 21):
        finished = killed_after(WRITERS[kind], tmp_path, newest + 1, count)
        # A store is locked while it is in use.
        found = WRITERS[kind](tmp_path)[1]()
        # The one that it was at may be there, too.
        assert newest < finished <= found <= finished + 1
        newest = found


def killed_after(
    writer: Callable[[Path], tuple[Write, object]], folder: Path, first: int, count: int
) -> int:
    """Kill a child that writes numbers from ``first`` on, and return the last one that it wrote.

    The kill comes after ``count`` of them, somewhere in a later one.
    """
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            write, _ = writer(folder)
            for number in range(first, first + 10**6):
                write(number)
                os.write(tell, number.to_bytes(8, "little"))
        os._exit(1)
    os.close(tell)
    with open(told, "rb", buffering=0) as file:
        said = b"".join(file.read(8) or b"" for _ in range(count))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        said += file.read()
    assert len(said) >= 8 * count, "the child failed"
    return int.from_bytes(said[-8:], "little")
