"""Traces are verified by a confined process."""

import gzip
import json
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases import cases
from tests.daemon.captures.capture_node import MANUAL, CaptureNode, read_here, trace
from tests.daemon.state.counted import counted
from tests.diagnosis.traces import cpu_rank
from warpwatch_capturing import child, confinement
from warpwatch_capturing.confinement import Ended, run, shortcomings
from warpwatch_capturing.verification import Expectation, TraceVerdict, verify
from warpwatch_daemon.doctor import host

ASKED = Expectation(rank=0, first_step=3, last_step=5)
KERNEL = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 3100, "dur": 90}


ON_GPU = replace(ASKED, on_gpu=True)
WINDOW = Expectation(rank=0, window_s=2.0)
GPU = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}


def judge(folder: Path, content: Any, expected: Expectation) -> TraceVerdict:
    data = content if isinstance(content, bytes) else gzip.compress(json.dumps(content).encode())
    (folder / "rank0.pt.trace.json.gz").write_bytes(data)
    (verdict,) = verify(folder, {"rank0.pt.trace.json.gz": expected}, run=read_here).values()
    return verdict


def with_event(event: dict[str, Any], **changes: Any) -> dict[str, Any]:
    content = trace()
    content["traceEvents"].append(event | changes)
    return content


def without(category: str) -> dict[str, Any]:
    content = trace()
    content["traceEvents"] = [e for e in content["traceEvents"] if e["cat"] != category]
    return content


def test_a_file_that_cannot_be_opened_is_an_error_only_when_it_is_read(tmp_path):
    opened = confinement.OpenedFile(tmp_path)
    with pytest.raises(IsADirectoryError):
        opened.open("rb")


# Without steps, and without its rank.
BARE = without("user_annotation") | {"warpwatch": {}}


WHOLE = json.dumps(trace()).encode()
CASES: dict[str, tuple[Expectation, Any]] = {
    "whole": (ASKED, trace()),
    "with a kernel": (ASKED, with_event(KERNEL)),
    "a step too few": (ASKED, trace(steps=range(3, 5))),
    "a step too many": (ASKED, trace(steps=range(2, 6))),
    "no steps": (ASKED, without("user_annotation")),
    "no operators": (ASKED, without("cpu_op")),
    "another rank": (ASKED, trace(rank=1)),
    "no rank": (ASKED, trace(warpwatch={})),
    "a rank that only PyTorch names": (ASKED, trace(warpwatch={}, distributedInfo={"rank": 0})),
    "an event at 0": (ASKED, with_event(KERNEL, ts=0.0)),
    "an event before 0": (ASKED, with_event(KERNEL, ts=-4.5)),
    "an event hours later": (ASKED, with_event(KERNEL, ts=9e9)),
    "text that is cut short": (ASKED, gzip.compress(WHOLE[:-40])),
    "a file that is cut short": (ASKED, gzip.compress(WHOLE)[:-20]),
    "garbage": (ASKED, b"garbage"),
    "a GPU without kernels": (ON_GPU, trace() | GPU),
    "a GPU with a kernel": (ON_GPU, with_event(KERNEL) | GPU),
    "a GPU that is not computed on": (ASKED, trace() | GPU),
    "a simulated GPU, which runs no kernels": (ON_GPU, trace(deviceProperties=[])),
    "a window without steps and rank": (WINDOW, BARE),
    "a window of any rank": (replace(WINDOW, rank=None), BARE | {"distributedInfo": {"rank": 5}}),
}


def test_what_a_trace_lacks_is_the_golden_list(tmp_path, golden):
    verdicts = {name: judge(tmp_path, content, asked) for name, (asked, content) in CASES.items()}
    lines = [f"{name}: {one.events} {list(one.problems)}" for name, one in verdicts.items()]
    golden("captures/problems.txt", "\n".join(lines).encode())


def test_a_file_that_is_gone_or_takes_too_long_costs_the_others_nothing(tmp_path):
    def run(module: str, arguments: Sequence[str], timeout_s: float, fds: Sequence[int]) -> Ended:
        assert timeout_s == 180
        is_slow = arguments[0].endswith("rank2")
        return Ended(None, ()) if is_slow else read_here(module, arguments, timeout_s, fds)

    (tmp_path / "rank1").write_text(json.dumps(trace(rank=1)))
    asked = {f"rank{rank}": Expectation(rank, 3, 5) for rank in range(3)}
    assert verify(tmp_path, asked, run=run) == {
        "rank0": TraceVerdict(None, ("unreadable: No such file or directory",)),
        "rank1": TraceVerdict(6, ()),
        "rank2": TraceVerdict(None, ("unreadable: not read in time",)),
    }


def test_one_damaged_trace_costs_the_other_ranks_no_diagnosis(tmp_path, stack):
    # In processes of their own, as in a daemon.
    node = CaptureNode(tmp_path, stack, run=confinement.run)
    capture = node.captured(MANUAL, b"garbage")
    assert capture.outcome == "partial"
    assert capture.detail == "rank 0 is not verified (unreadable: is not JSON)"
    assert [(rank.verified, rank.events) for rank in capture.ranks] == [(False, None), (True, 6)]
    assert capture.diagnosis is not None
    assert [found["rank"] for found in capture.diagnosis["traces"]] == [1]
    assert counted(node.hub, "capture_problems_total", "unreadable") == 1
    assert node.store.load(10)[0].ranks == capture.ranks


def test_a_trace_that_lacks_something_is_kept_and_the_capture_says_what(node):
    capture = node.captured(MANUAL, trace(), trace(rank=1, steps=range(3, 5), **GPU))
    assert capture.outcome == "complete"
    problems = ("steps: 3 to 4 instead of 3 to 5", "no_kernels: the rank computes on a GPU")
    assert capture.detail == f"rank 1 is not verified ({'; '.join(problems)})"
    assert capture.ranks[1].verified is False
    assert "rank1.pt.trace.json.gz" in capture.files
    assert capture.diagnosis is not None
    for problem in ("steps", "no_kernels"):
        assert counted(node.hub, "capture_problems_total", problem) == 1


def test_a_store_that_is_gone_ends_the_capture(node):
    asked = node.service.request(MANUAL)
    node.service.finish()
    for rank in (0, 1):
        node.deliver(rank)
    shutil.rmtree(node.store.path)
    capture = node.finished(asked)
    assert capture.outcome == "failed"
    problem = "the store: No such file or directory"
    assert capture.detail == f"rank 0: {problem}; rank 1: {problem}"
    assert node.counted("failed") == 1


def written(folder: Path, world_size: int) -> list[str]:
    for rank in range(2):
        found = cpu_rank(rank, waiting_us=3000)
        found.head["distributedInfo"]["world_size"] = world_size
        found.write(folder / f"rank{rank}.json")
    return ["rank0.json", "rank1.json"]


def test_ranks_that_brought_no_trace_are_named_with_their_reason(tmp_path):
    files = written(tmp_path, world_size=3)
    missing = {2: "did not answer"}
    assert child.diagnose("trace", tmp_path, files, missing, run=read_here) == "ok"
    found = json.loads((tmp_path / "diagnosis.json").read_text())
    assert found["verdict"] == "inconclusive"
    assert "without the trace of rank 2 (did not answer) the reason" in found["summary"]


def test_without_memory_there_is_no_diagnosis(tmp_path, monkeypatch):
    files = written(tmp_path, 2)
    for left, outcome in (((192 << 20) - 1, "no_memory"), (192 << 20, "ok")):
        monkeypatch.setattr(child, "memory_left", lambda left=left: left)
        assert child.diagnose("trace", tmp_path, files, {}, run=read_here) == outcome


@pytest.mark.parametrize(
    ("host_gib", "group_gib", "left_mib"), [(6, 8, 3072), (20, 3, 2016), (9, 9, 4096)]
)
def test_a_diagnosis_gets_half_of_the_host_or_the_rest_of_its_group(
    tmp_path, host_gib, group_gib, left_mib
):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/\n")
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {host_gib << 20} kB\n")
    (tmp_path / "memory.max").write_text(f"{group_gib << 30}")
    (tmp_path / "memory.current").write_text(f"{1 << 30}")
    assert child.memory_left(tmp_path, tmp_path) == left_mib << 20


def test_a_diagnosis_that_is_killed_for_memory_keeps_nothing_and_is_said(tmp_path):
    (tmp_path / "diagnosis.json").write_text("before")

    def is_killed(module: str, arguments: Sequence[str], timeout_s: float, fds: Any) -> Ended:
        os.write(fds[0], b"half")
        return Ended(-signal.SIGKILL, ())

    files = written(tmp_path, 2)
    assert child.diagnose("trace", tmp_path, files, {}, run=is_killed) == "no_memory"
    assert (tmp_path / "diagnosis.json").read_text() == "before"


def test_files_of_one_rank_are_no_capture(tmp_path):
    name, _ = written(tmp_path, world_size=2)
    outcome = child.diagnose("trace", tmp_path, [name, name], {}, run=read_here)
    assert outcome.startswith(child.UNREADABLE + "these are not ranks of one capture: rank 0")


_BEGIN = """
import os, signal, socket, sys
from warpwatch_capturing.confinement import confine
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
    calls = cases(__file__)["forbidden"]
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
    done = ended(attack, "print(os.getpid(), *os.getresuid(), *os.getresgid(), os.getgroups())")
    pid, *others, groups = done.lines[0].split()
    assert others == [str(1_900_000_000 + int(pid) % 10_000_000)] * 6
    assert groups == "[]"
    needs_more = "from warpwatch_capturing import confinement\n"
    needs_more += "confinement._NEEDED_CAPABILITIES |= 1 << 62\n"
    attack.write_text(f"{needs_more}{_BEGIN}print(os.getuid() == uid)")
    assert run("attack", []) == Ended(0, ("True",))


def test_who_needs_too_much_memory_time_or_output_is_ended(attack):
    assert ended(attack, "bytearray(2 << 30)").lines[-1] == "MemoryError"
    assert ended(attack, "while True: pass").killed_by == "it takes too long for its size"
    done = ended(attack, "while True: os.write(1, b'x' * (1 << 20))")
    assert (done.status, sum(map(len, done.lines)) <= 2**16) == (1, True)
    assert ended(attack, "print('x' * 2**17)\nprint('last')").lines[-1] == "last"
    attack.write_text(_BEGIN + "signal.pause()")
    assert run("attack", [], timeout_s=0.5).killed_by == "not read in time"


def test_what_the_kernel_refuses_is_logged_once(attack, caplog):
    code = "print('unconfined: deny_system_calls: Invalid argument')"
    for _ in range(2):
        assert ended(attack, code) == Ended(0, ())
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "deny_system_calls: Invalid argument"
    ]


def test_the_doctor_names_what_this_machine_does_not_grant(attack):
    assert shortcomings() == ()
    assert host.trace_reader().ok
    other = "import platform\nplatform.machine = lambda: 'riscv64'\n"
    (attack.parent / "sitecustomize.py").write_text(other)
    (missing,) = shortcomings()
    assert missing == "deny_system_calls: no filter for riscv64"
    check = host.trace_reader()
    assert (check.ok, check.detail) == (None, f"less protected: {missing}")
