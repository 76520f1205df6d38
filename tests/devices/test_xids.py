"""XIDs are counted once, from all origins; only new ones in the kernel log, in every spelling."""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.devices.hand_loops import HandLoops
from tests.devices.recording import RecordingSink
from tests.manual_clock import ManualClock
from warpwatch_devices import xids
from warpwatch_devices.xids import KernelLogSource, parse_record

GPU = "GPU-1a"
ADDRESS = "00000000:1A:00.0"
LOG_ADDRESS = "0000:1a:00"
NVML, LOG = (ADDRESS, "nvml"), (LOG_ADDRESS, "kernel_log")


class Ledger(xids.XidLedger):
    def __init__(self, known: bool = True) -> None:
        self.clock = ManualClock()
        super().__init__(self.clock.wall)
        if known:
            self.register(GPU, ADDRESS)

    def told(self, by: tuple[str, str], xid: int, times: int = 1) -> list[bool]:
        return [self.observe(by[0], xid, by[1]) for _ in range(times)]

    def total(self, xid: int, uuid: str = GPU) -> float | None:
        return self.values(uuid).get(("device_xid_errors_total", (str(xid),)))


def test_every_spelling_of_a_pci_address_is_the_same_gpu(cases):
    cases("pci_addresses.txt", xids.normalised_address)


def test_an_xid_before_its_gpu_is_known_is_kept_for_it_within_bounds():
    ledger = Ledger(known=False)
    assert ledger.told(LOG, 143) == [True]
    assert ledger.values(GPU) == {}
    ledger.register(GPU, ADDRESS)
    assert ledger.total(143) == 1
    for bus in range(256):
        ledger.told((f"0001:{bus:02x}:00", "kernel_log"), 13)
    for xid in range(1, 1000):
        ledger.told(("0001:00:00", "kernel_log"), xid)
    # One that is kept counts on.
    assert ledger.told(("0001:00:00", "kernel_log"), 128, 2) == [True, True]
    ledger.register("GPU-first", "0001:00:00")
    ledger.register("GPU-last", "0001:ff:00")
    assert len(ledger.values("GPU-first")) == 256
    assert ledger.values("GPU-last") == {}


def test_a_storm_is_logged_once_and_counted_in_full(caplog):
    ledger = Ledger()
    ledger.told(NVML, 79, 50)
    ledger.clock.advance(59)
    ledger.told(NVML, 79)
    assert caplog.messages == ["device GPU-1a (0000:1a:00): XID 79, GPU has fallen off the bus"]
    ledger.clock.advance(1)
    ledger.told(NVML, 79)
    assert len(caplog.records) == 2
    assert ledger.total(79) == 52
    ledger.clock.set_wall(1_000_000_000.0)
    ledger.told(NVML, 79)
    assert len(caplog.records) == 3
    # So many reports of a storm wait for those of the other origin.
    ledger.told(NVML, 13, 300)
    assert sum(ledger.told(LOG, 13, 300)) == 300 - 256


FALLEN = "4,1201,5140900123,-;NVRM: Xid (PCI:0000:1a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."  # noqa: E501


def test_a_record_tells_its_xids(cases):
    cases("kernel_log_records.txt", parse_record)


class Node:
    def __init__(self, path: Path) -> None:
        self.path, self.ledger, self.sink = path, Ledger(), RecordingSink()
        self.clock = self.ledger.clock
        self.loops = HandLoops(self.clock)
        self.source = KernelLogSource(self.ledger, path, self.clock.monotonic, self.clock.wall)
        self.source.start(self.loops, self.sink)

    def read(self, written: str = "") -> None:
        with self.path.open("a", encoding="utf-8") as log:
            log.write(written)
        self.round()

    def round(self) -> None:
        self.clock.advance(1)
        self.loops.run("kernel_log")

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


def test_records_that_were_overwritten_while_the_log_is_read_are_left_out(
    tmp_path, begin, monkeypatch
):
    (tmp_path / "kmsg").touch()
    read = Mock(side_effect=[b"1\n", BrokenPipeError, b"2\n3\n", BlockingIOError])
    descriptors = len(os.listdir("/proc/self/fd"))
    assert xids.read_all(tmp_path / "kmsg", read) == ["1", "2", "3"]
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    node = begin(tmp_path / "kmsg")
    overwritten = BrokenPipeError(errno.EPIPE, "Broken pipe")
    with monkeypatch.context() as patch:
        reads = [b"", overwritten, f"{FALLEN}\n".encode(), b""]
        patch.setattr(os, "read", Mock(side_effect=reads))
        node.round()
        node.round()
    assert (node.ledger.total(79), node.sink.healths[-1].errors) == (1, 1)


LOADED = "4,9,5140900124,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  575.57.08\n"


@pytest.mark.parametrize(
    ("before", "seen_s_ago"),
    [
        ("", None),
        (FALLEN, 100.0),
        (FALLEN.replace("79", "31"), None),
        (FALLEN + "\n" + LOADED, None),
        (FALLEN.partition(";")[2], None),
        # By a program, and at a moment in the future.
        (FALLEN + "\n" + LOADED.replace("4,9", "12,9"), 100.0),
        (FALLEN.replace(",5140900123", ",9140900123"), 0.0),
    ],
)
def test_only_what_is_written_after_the_start_counts_but_grave_xids_before_it_are_known(
    tmp_path, begin, before, seen_s_ago
):
    log = tmp_path / "kmsg"
    log.write_text(before + "\n")
    node = begin(log)
    node.clock.advance(5140.900123 + 99 - node.clock.monotonic())
    node.read()
    last_time = node.ledger.values(GPU).get(("device_xid_last_timestamp_seconds", ("79",)))
    assert (node.ledger.total(79), node.ledger.total(31)) == (0, None)
    seen_at = None if seen_s_ago is None else node.clock.wall() - seen_s_ago
    assert last_time == (seen_at and pytest.approx(seen_at, abs=0.01))
    node.read("4,9,9,-;NVRM: Xid (PCI:0000:1a:00): 31, pid=1, MMU Fault\n")
    assert (node.ledger.total(31), node.ledger.total(79)) == (1, 0)
    assert node.healths == [("kernel_log", True, "")] * 2


def test_a_pipe_is_read_and_a_record_in_two_pieces_is_one(tmp_path, begin):
    log = tmp_path / "kmsg"
    os.mkfifo(log)
    node = begin(log)
    node.round()
    node.read(FALLEN[:40])
    assert node.ledger.total(79) == 0
    node.read(FALLEN[40:] + "\n SUBSYSTEM=pci\n")
    assert node.ledger.total(79) == 1
    node.round()
    assert node.healths[-1] == ("kernel_log", True, "")


def test_a_flood_is_read_in_bounded_rounds(tmp_path, begin, monkeypatch):
    monkeypatch.setattr(xids, "MAX_RECORDS_PER_ROUND", 10)
    (tmp_path / "kmsg").touch()
    node = begin(tmp_path / "kmsg")
    node.round()
    totals = []
    node.read("4,9,9,-;NVRM: Xid (PCI:0000:1a:00): 13, Graphics Exception\n" * 35)
    for _ in range(4):
        totals.append(node.ledger.total(13))
        node.round()
    assert totals == [10, 20, 30, 35]
    # A record without end is dropped, and counted.
    monkeypatch.setattr(xids, "MAX_RECORD_BYTES", 100)
    node.read("x" * 101)
    assert node.sink.healths[-1].errors == 1
    node.read("\n" + FALLEN + "\n")
    assert node.ledger.total(79) == 1


def test_no_log_is_said(tmp_path, begin, caplog):
    caplog.set_level(logging.INFO)
    node = begin(tmp_path / "none" / "kmsg")
    node.round()
    node.clock.advance(60)
    node.round()
    node.path.parent.mkdir()
    node.path.touch()
    # It is tried again after a minute.
    for _ in range(59):
        node.round()
    assert (node.sink.healths, node.ledger.total(79)) == ([], None)
    (text,) = caplog.messages
    assert "No such file or directory" in text and "CAP_SYSLOG" in text
    node.round()
    assert (node.healths, node.ledger.total(79)) == ([("kernel_log", True, "")], 0)
    assert node.sink.healths[-1].errors == 0


def test_a_log_that_breaks_later_is_down(tmp_path, begin):
    node = begin(tmp_path / "kmsg")
    node.read()
    # The begin of a line of a program.
    node.read("9,1,1,-;")
    broken = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    os.dup2(broken, node.source._log or -1)
    os.close(broken)
    node.round()
    assert node.healths[-1] == ("kernel_log", False, f"{node.path}: Is a directory")
    assert (node.sink.healths[-1].errors, node.sink.healths[-1].duration_s) == (1, 0.0)
    # It is opened again after a minute.
    node.path.write_text(FALLEN + "\n")
    node.clock.advance(60)
    node.round()
    assert ("device_xid_last_timestamp_seconds", ("79",)) in node.ledger.values(GPU)
    node.read(FALLEN + " NVRM: Xid (PCI:0000:1a:00): 45, x\n")
    assert node.ledger.total(45) == 1
    assert (node.healths[-1], node.ledger.total(79)) == (("kernel_log", True, ""), 1)


PIECES = ["NVRM: ", "Xid ", "(PCI:", "0000:1a:00", "GPU-I:05", "): ", "79", ",", ";", "\x00", "é"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=30).map("".join))
def test_no_text_breaks_the_parser(text):
    for address, xid in parse_record(text):
        assert address in text
        assert 1 <= xid <= 9999


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="/dev/kmsg may not be read here")
def test_the_real_kernel_log_is_read_without_blocking(begin):
    node = begin(Path("/dev/kmsg"))
    node.round()
    node.round()
    assert node.healths[-1] == ("kernel_log", True, "")
