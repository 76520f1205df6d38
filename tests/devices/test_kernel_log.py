"""XIDs from the kernel log: every spelling of the line, only new ones, and never a blocked read."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.devices.recording import RecordingSink, wait_until
from warpwatch_daemon.agent.supervisor import Supervisor
from warpwatch_devices import kernel_log
from warpwatch_devices.kernel_log import KernelLogSource, parse_record
from warpwatch_devices.xid_ledger import XidLedger

GPU = "GPU-1a"
FALLEN = "4,1201,5140900123,-;NVRM: Xid (PCI:0000:1a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."  # noqa: E501


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (FALLEN, [("0000:1a:00", 79)]),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", [("0000:03:00", 14)]),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 43, pid=77, Ch 0", [("0000:01:00", 43)]),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 13", [("0000:01:00", 13)]),
        ("NVRM: Xid (PCI:0000:b2:00 GPU-b850f46d-d5ea): 31, pid=1", [("0000:b2:00", 31)]),
        ("NVRM: Xid (PCI:00000000:1A:00.0): 48, uncorrectable", [("00000000:1A:00.0", 48)]),
        ("NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal (0x1)", [("0018:01:00", 149)]),
        (
            "kern: NVRM: Xid (PCI:0000:1a:00): 45, x NVRM: Xid (PCI:0000:1b:00): 45, y",
            [("0000:1a:00", 45), ("0000:1b:00", 45)],
        ),
        (" SUBSYSTEM=pci NVRM: Xid (PCI:0000:1a:00): 79", []),
        ("4,1,2,-;NVRM: GPU at PCI:0000:1a:00: GPU-b850f46d", []),
        # Facility 1: a program wrote it.
        ("12,1,2,-;app: NVRM: Xid (PCI:0000:1a:00): 79, x", []),
        ("4,1,2,-;nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Non-fatal, Link 30", []),
        ("NVRM: Xid (PCI:0000:1a:00): none", []),
        ("NVRM: Xid (PCI:0000:1a:00): 0, x", []),
        ("NVRM: Xid (PCI:0000:1a:00): 123456, x", []),
        ("NVRM: Xid (PCI:somewhere): 79, x", []),
        ("", []),
    ],
)
def test_a_record_tells_its_xids(record, found):
    assert parse_record(record) == found


PIECES = ["NVRM: ", "Xid ", "(PCI:", "0000:1a:00", "GPU-I:05", "): ", "79", ",", ";", "\x00", "é"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=30).map("".join))
def test_no_text_breaks_the_parser(text):
    for address, xid in parse_record(text):
        assert address in text
        assert 1 <= xid <= 9999


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "INTERVAL_S", 0.05)


class Node:
    """A kernel log in a file or pipe, and the source that reads it."""

    def __init__(self, path: Path) -> None:
        self.ledger = XidLedger()
        self.ledger.register(GPU, "00000000:1A:00.0")
        self.sink = RecordingSink()
        self.supervisor = Supervisor()
        self.source = KernelLogSource(self.ledger, path)

    def __enter__(self) -> Node:
        self.source.start(self.supervisor, self.sink)
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.stop(2.0)
        self.source.close()

    def total(self, xid: int) -> float | None:
        return self.ledger.values(GPU).get(("device_xid_errors_total", (str(xid),)))

    def read_until(self, xid: int, total: float) -> None:
        wait_until(lambda: self.total(xid) == total)


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as log:
        log.write(text)


def test_only_what_is_written_after_the_start_counts(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text(FALLEN + "\n")
    with Node(log) as node:
        wait_until(lambda: node.total(79) == 0)
        append(log, "4,9,9,-;NVRM: Xid (PCI:0000:1a:00): 31, pid=1, MMU Fault\n")
        node.read_until(31, 1)
        assert node.total(79) == 0


def test_a_pipe_is_read_and_a_record_in_two_pieces_is_one(tmp_path):
    log = tmp_path / "kmsg"
    os.mkfifo(log)
    with Node(log) as node:
        wait_until(lambda: node.total(79) == 0)
        with log.open("w", encoding="utf-8") as pipe:
            pipe.write(FALLEN[:40])
            pipe.flush()
            rounds = node.supervisor.loops[0].runs
            wait_until(lambda: node.supervisor.loops[0].runs > rounds + 1)
            assert node.total(79) == 0
            pipe.write(FALLEN[40:] + "\n SUBSYSTEM=pci\n")
        node.read_until(79, 1)


def test_a_flood_is_read_in_bounded_rounds_and_in_full(tmp_path, monkeypatch):
    log = tmp_path / "kmsg"
    log.touch()
    monkeypatch.setattr(kernel_log, "MAX_RECORDS_PER_ROUND", 10)
    with Node(log) as node:
        wait_until(lambda: node.total(79) == 0)
        rounds = node.supervisor.loops[0].runs
        append(log, "4,9,9,-;NVRM: Xid (PCI:0000:1a:00): 13, Graphics Exception\n" * 95)
        node.read_until(13, 95)
        assert node.supervisor.loops[0].runs - rounds >= 9


def test_a_log_that_works_is_healthy(tmp_path):
    log = tmp_path / "kmsg"
    log.touch()
    with Node(log) as node:
        wait_until(lambda: node.sink.healths)
        health = node.sink.healths[0]
        assert (health.name, health.up, health.reason) == ("kernel_log", True, "")


def test_a_log_that_is_missing_is_reported_once_and_is_no_fault(tmp_path, caplog):
    with caplog.at_level(logging.INFO), Node(tmp_path / "none") as node:
        loop = node.supervisor.loops[0]
        wait_until(lambda: loop.runs >= 3)
        assert node.sink.healths == []
        assert loop.failures == 0
        assert node.total(79) is None
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1
    assert "No such file or directory" in texts[0] and "CAP_SYSLOG" in texts[0]


def test_a_log_that_breaks_later_is_down(tmp_path):
    log = tmp_path / "kmsg"
    log.touch()
    with Node(log) as node:
        wait_until(lambda: node.sink.healths)
        broken = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        os.dup2(broken, node.source._log or -1)
        os.close(broken)
        wait_until(lambda: not node.sink.healths[-1].up)
        assert "Is a directory" in node.sink.healths[-1].reason


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="/dev/kmsg may not be read here")
def test_the_real_kernel_log_is_read_without_blocking():
    with Node(Path("/dev/kmsg")) as node:
        wait_until(lambda: node.supervisor.loops[0].runs >= 2)
        assert node.supervisor.loops[0].failures == 0
