"""Files of the daemon: written as a whole, never through a link, and by one function."""

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import cases
from warpwatch_daemon.history.archive import FILE as HISTORY
from warpwatch_daemon.history.archive import HistoryStore
from warpwatch_exporters.jsonl import JsonlWriter
from warpwatch_runtime import files
from warpwatch_runtime.directory import Directory, make, open_own
from warpwatch_runtime.http_requests import connect

ROOT = Path(__file__).resolve().parents[2]
EXCEPTIONS = cases(__file__)["exceptions"]
WRITERS = ("daemon", "fleet", "serving", "capturing", "exporters", "runtime", "telemetry")
# But through `files`, and gzip, which gets the opened file.
WRITES = re.compile(
    r"\bO_(WRONLY|RDWR|CREAT|APPEND|TRUNC)\b|\bsqlite3\.connect\(|\b(?<!files\.)"
    r"(write_text|write_bytes|touch|mkstemp|NamedTemporaryFile)\("
    r"|(?<!gzip\.)\bopen\([^)]*[\"'](?=\w*[wax+])[rwabxt+]{1,3}[\"']"
)


def test_nothing_else_in_the_daemon_opens_a_file_for_writing():
    writers = {
        str(path.relative_to(ROOT / folder)): lines
        for folder in WRITERS
        for path in (ROOT / folder).rglob("*.py")
        if (lines := [one[0] for one in WRITES.finditer(path.read_text())])
    }
    assert writers.keys() == EXCEPTIONS.keys(), writers


def test_no_descriptor_stays_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for number in range(50):
        files.write(tmp_path / "state", b"new", durable=True)
        files.make_folders(tmp_path, tmp_path / "made" / str(number))
        assert not (Directory(tmp_path) / "made" / str(number)).unlink("none")
        with (Directory(tmp_path) / "made").opened() as fd:
            make(fd, "own", 0o700)
            os.close(open_own(fd, "kept"))
            with pytest.raises(FileExistsError):
                open_own(fd, "own")
        with pytest.raises(FileNotFoundError):
            connect(tmp_path / "none.sock", 1.0)
    # Other threads may open some.
    assert len(os.listdir("/proc/self/fd")) < before + 50


@pytest.mark.parametrize(("limits", "allowed"), cases(__file__)["open_files"])
def test_the_limit_of_open_files_is_raised_to_enough(limits, allowed, monkeypatch):
    given = list[object]()
    kernel: dict[str, Any] = {"RLIMIT_NOFILE": 7, "RLIM_INFINITY": -1}
    kernel |= {"getrlimit": lambda which: limits, "setrlimit": lambda *call: given.append(call)}
    monkeypatch.setattr(files, "resource", SimpleNamespace(**kernel))
    files.allow_enough()
    assert given == [(7, tuple(one)) for one in allowed]


def test_the_history_and_the_telemetry_log_are_written_through_no_link(tmp_path):
    victim = tmp_path / "victim"
    (tmp_path / HISTORY).symlink_to(victim)
    (tmp_path / "log.jsonl").symlink_to(victim)
    failures: list[str] = []
    HistoryStore(tmp_path, 1e9, failures.append).newest(1)
    with pytest.raises(OSError) as refused:
        JsonlWriter(tmp_path / "log.jsonl")
    assert refused.value.errno == errno.ELOOP
    assert failures == ["read"]
    assert not victim.exists()
