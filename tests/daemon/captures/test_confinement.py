"""What a process that reads strangers' files can still do once somebody has taken it over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from warpwatch_daemon.captures.confinement import MAX_OUTPUT_BYTES, Ended, run, shortcomings
from warpwatch_daemon.doctor import agent

_BEGIN = """
import os, signal, socket, sys
from warpwatch_daemon.captures.confinement import confine
uid = os.getuid()
confine(1 << 30, 1)
def attempt(*call):
    try:
        call[0](*call[1:])
        print("done")
    except OSError as error:
        print(os.strerror(error.errno))
"""


@pytest.fixture
def attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "attack.py"


def ended(attack: Path, code: str) -> Ended:
    attack.write_text(_BEGIN + code)
    return run("attack", [], timeout_s=300)


def test_it_talks_to_no_one_starts_nothing_and_opens_nothing(attack):
    calls = (
        "socket.socket",
        "socket.socket, socket.AF_UNIX",
        "socket.socketpair",
        "os.fork",
        "os.execv, '/bin/true', ['true']",
        "os.kill, os.getppid(), 0",
        "os.open, '/etc/passwd', os.O_RDONLY",
        "os.open, 'new', os.O_WRONLY | os.O_CREAT",
        "os.unlink, __file__",
        "os.rename, __file__, 'other'",
        "os.symlink, '/', 'link'",
        "os.chmod, __file__, 0o777",
        "os.setuid, 0",
    )
    done = ended(attack, "".join(f"attempt({call})\n" for call in calls))
    assert done.status == 0
    assert dict(zip(calls, done.lines, strict=True)) == dict.fromkeys(
        calls, "Operation not permitted"
    )


def test_it_has_no_secret_of_the_daemons_environment(attack, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    found = ended(attack, "print('hunter2' in repr(os.environ), 'PYTHONPATH' in os.environ)")
    assert found == Ended(0, ("False True",))


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_root_becomes_a_user_that_no_other_process_has(attack):
    done = ended(attack, "print(*os.getresuid(), *os.getresgid(), os.getgroups())")
    real, *others, groups = done.lines[0].split()
    assert int(real) >= 1_900_000_000
    assert others == [real] * 5
    assert groups == "[]"


def test_who_needs_too_much_memory_fails_at_once(attack):
    assert ended(attack, "bytearray(2 << 30)").lines[-1] == "MemoryError"


def test_who_computes_or_waits_for_too_long_is_ended(attack):
    assert ended(attack, "while True: pass").killed_by == "it takes too long for its size"
    attack.write_text(_BEGIN + "signal.pause()")
    assert run("attack", [], timeout_s=0.5).killed_by == "not read in time"


def test_who_writes_too_much_is_cut_off(attack):
    done = ended(attack, "while True: os.write(1, b'x' * (1 << 20))")
    assert done.status == 1
    assert sum(map(len, done.lines)) <= MAX_OUTPUT_BYTES


def test_what_the_kernel_refuses_is_logged_once(attack, caplog):
    code = "print('unconfined: deny_system_calls: Invalid argument')"
    for _ in range(2):
        assert ended(attack, code) == Ended(0, ())
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "deny_system_calls: Invalid argument"
    ]


def test_the_doctor_names_what_this_machine_does_not_grant(attack):
    assert shortcomings() == ()
    assert agent.trace_reader().ok
    other = "import platform\nplatform.machine = lambda: 'riscv64'\n"
    (attack.parent / "sitecustomize.py").write_text(other)
    (missing,) = shortcomings()
    assert missing == "deny_system_calls: no filter for riscv64"
    check = agent.trace_reader()
    assert (check.ok, check.detail) == (None, f"less protected: {missing}")
