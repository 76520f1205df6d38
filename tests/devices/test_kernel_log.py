"""XIDs from the kernel log: every spelling of the line, only new ones, and never a blocked read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.devices.conftest import Cases
from tests.devices.hand_loops import HandLoops
from tests.devices.recording import RecordingSink
from tests.manual_clock import ManualClock
from warpwatch_devices import kernel_log
from warpwatch_devices.kernel_log import KernelLogSource, parse_record
from warpwatch_devices.xid_ledger import XidLedger

GPU = "GPU-1a"
FALLEN = "4,1201,5140900123,-;NVRM: Xid (PCI:0000:1a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."  # noqa: E501


def test_a_record_tells_its_xids(cases: Cases) -> None:
    cases("kernel_log_records.txt", parse_record)


PIECES = ["NVRM: ", "Xid ", "(PCI:", "0000:1a:00", "GPU-I:05", "): ", "79", ",", ";", "\x00", "é"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=30).map("".join))
def test_no_text_breaks_the_parser(text: str) -> None:
    for address, xid in parse_record(text):
        assert address in text
        assert 1 <= xid <= 9999


class Node:
    """A kernel log in a file or pipe, and the source that reads it round by round."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock, self.sink = path, ManualClock(), RecordingSink()
        self.loops = HandLoops(self.clock)
        self.ledger = XidLedger(self.clock.wall)
        self.ledger.register(GPU, "00000000:1A:00.0")
        self.source = KernelLogSource(self.ledger, path, self.clock.monotonic)
        self.source.start(self.loops, self.sink)

    def read(self, written: str = "") -> None:
        with self.path.open("a", encoding="utf-8") as log:
            log.write(written)
        self.round()

    def round(self) -> None:
        self.clock.advance(1)
        self.loops.run("kernel_log")

    def total(self, xid: int) -> float | None:
        return self.ledger.values(GPU).get(("device_xid_errors_total", (str(xid),)))

    @property
    def healths(self) -> list[tuple[str, bool, str]]:
        return [(one.name, one.up, one.reason) for one in self.sink.healths]


@pytest.fixture
def begin() -> Iterator[Callable[[Path], Node]]:
    nodes: list[Node] = []

    def begin(path: Path) -> Node:
        nodes.append(Node(path))
        return nodes[-1]

    yield begin
    for node in nodes:
        node.source.close()


Begin = Callable[[Path], Node]


def test_only_what_is_written_after_the_start_counts(tmp_path: Path, begin: Begin) -> None:
    log = tmp_path / "kmsg"
    log.write_text(FALLEN + "\n")
    node = begin(log)
    node.read()
    assert node.total(79) == 0
    node.read("4,9,9,-;NVRM: Xid (PCI:0000:1a:00): 31, pid=1, MMU Fault\n")
    assert (node.total(31), node.total(79)) == (1, 0)
    assert node.healths == [("kernel_log", True, "")] * 2


def test_a_pipe_is_read_and_a_record_in_two_pieces_is_one(tmp_path: Path, begin: Begin) -> None:
    log = tmp_path / "kmsg"
    os.mkfifo(log)
    node = begin(log)
    node.round()
    node.read(FALLEN[:40])
    assert node.total(79) == 0
    node.read(FALLEN[40:] + "\n SUBSYSTEM=pci\n")
    assert node.total(79) == 1
    node.round()
    assert node.healths[-1] == ("kernel_log", True, "")


def test_a_flood_is_read_in_bounded_rounds(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_log, "MAX_RECORDS_PER_ROUND", 10)
    (tmp_path / "kmsg").touch()
    node = begin(tmp_path / "kmsg")
    node.round()
    totals = []
    node.read("4,9,9,-;NVRM: Xid (PCI:0000:1a:00): 13, Graphics Exception\n" * 35)
    for _ in range(4):
        totals.append(node.total(13))
        node.round()
    assert totals == [10, 20, 30, 35]
    # A record without end is dropped, and counted.
    monkeypatch.setattr(kernel_log, "MAX_RECORD_BYTES", 100)
    node.read("x" * 101)
    assert node.sink.healths[-1].errors == 1
    node.read("\n" + FALLEN + "\n")
    assert node.total(79) == 1


def test_a_missing_log_is_said(
    tmp_path: Path, begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node = begin(tmp_path / "none" / "kmsg")
    for _ in range(round(kernel_log.REOPEN_INTERVAL_S)):
        node.round()
    node.path.parent.mkdir()
    node.path.touch()
    assert (node.sink.healths, node.total(79)) == ([], None)
    (text,) = caplog.messages
    assert "No such file or directory" in text and "CAP_SYSLOG" in text
    node.round()
    assert (node.healths, node.total(79)) == ([("kernel_log", True, "")], 0)


def test_a_log_that_breaks_later_is_down(tmp_path: Path, begin: Begin) -> None:
    node = begin(tmp_path / "kmsg")
    node.read()
    broken = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    os.dup2(broken, node.source._log or -1)
    os.close(broken)
    node.round()
    assert node.healths[-1] == ("kernel_log", False, f"{node.path}: Is a directory")
    assert node.sink.healths[-1].errors == 1


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="/dev/kmsg may not be read here")
def test_the_real_kernel_log_is_read_without_blocking(begin: Begin) -> None:
    node = begin(Path("/dev/kmsg"))
    node.round()
    node.round()
    assert node.healths[-1] == ("kernel_log", True, "")
