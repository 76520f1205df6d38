"""The shim in real processes: what it leaves in the ring, and what it leaves alone."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.client.daemon_side import Folder, Ring, eventually, program
from warpwatch import protocol, rendezvous

STEPPING = """
import sys, time
import warpwatch
monitor = warpwatch.attach(job="demo")
steps, period_s = int(sys.argv[1]), float(sys.argv[2])
number = 0
while number != steps:
    with monitor.step(samples=4, tokens=10):
        with monitor.phase("forward"):
            time.sleep(period_s)
    number += 1
"""
WAIT_FOR_RING = """
def wait_for_ring():
    while monitor.clock.ring is None:
        with monitor.step(samples=1):
            time.sleep(0.01)
"""
ATTACHED = (
    "import os, sys, time\nimport warpwatch\n"
    'monitor = warpwatch.attach(job="demo")\n' + WAIT_FOR_RING + "wait_for_ring()\n"
)


def test_steps_before_the_ring_are_in_the_totals(folder: Folder) -> None:
    with program(folder, STEPPING, "100", "0.005") as process:
        assert process.communicate(timeout=60) == ("", "")
    ring = folder.ring()
    totals = ring.header.totals
    assert ring.header.ended
    assert (totals.steps, totals.newest_step, totals.samples, totals.tokens) == (100, 99, 400, 1000)
    assert ring.metadata["phases"] == ["forward"]
    assert 0.5e9 <= totals.phases_ns[0] <= totals.duration_ns < 2e9
    assert ring.events == [{"event": "exit"}]
    numbers = [step[0] for step in ring.steps]
    assert numbers == list(range(numbers[0], 100))
    assert ring.header.step_begun == 99
    number, duration_ns, gpu_ns, allocated, samples, tokens, forward_ns, flags = ring.steps[-1]
    assert (number, samples, tokens, flags) == (99, 4, 10, 0)
    assert gpu_ns == allocated == protocol.ABSENT
    assert 0 < forward_ns <= duration_ns


def test_a_ring_is_whole_readable_and_locked_by_its_process(folder: Folder) -> None:
    with program(folder, "import os; os.umask(0o077)\n" + STEPPING, "-1", "0.005") as process:
        eventually(folder.rings)
        path = next((folder.path / "ranks").iterdir())
        status = path.stat()
        assert status.st_mode & 0o777 == 0o644
        # No holes: a write into one would kill the process when the disk is full.
        assert status.st_blocks * 512 >= status.st_size == protocol.RING_SIZE
        fd = os.open(path, os.O_RDONLY)
        assert rendezvous.lock_holder(fd) == process.pid
        identity = folder.ring().header.identity
        assert identity.pid == process.pid
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        assert identity.process_start == int(ticks)
        process.kill()
        process.wait()
        assert rendezvous.lock_holder(fd) is None
        os.close(fd)


def test_two_ranks_are_two_rings(folder: Folder) -> None:
    first = program(folder, STEPPING, "60", "0.005", RANK="0", WORLD_SIZE="2")
    second = program(folder, STEPPING, "60", "0.005", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    with first as one, second as two:
        one.wait(20)
        two.wait(20)
    reported = [(ring.metadata["rank"], ring.metadata["world_size"]) for ring in folder.rings()]
    assert sorted(reported) == [(0, 2), (1, 2)]
    assert all(ring.name.startswith(f"demo-r{ring.metadata['rank']}-") for ring in folder.rings())


def test_a_process_without_steps_is_no_rank(folder: Folder) -> None:
    code = ATTACHED.replace("wait_for_ring()\n", "") + "time.sleep(0.3)"
    with program(folder, code) as process:
        assert process.wait(20) == 0
    assert list((folder.path / "ranks").iterdir()) == []


def test_a_killed_writer_leaves_a_ring_that_reads_cleanly(folder: Folder) -> None:
    chance = random.Random(1)
    for _ in range(8):
        with program(folder, STEPPING, "-1", "0") as process:
            eventually(folder.rings)
            time.sleep(chance.uniform(0.05, 0.2))
            process.send_signal(signal.SIGKILL)
            process.wait()
        ring = folder.ring()
        totals = ring.header.totals
        assert ring.torn == 0
        assert not ring.header.ended
        assert ring.header.step_begun is not None
        assert totals.samples == totals.steps * 4
        # Short steps are settled together: their records first, then the totals.
        assert totals.steps - 1 <= [step[0] for step in ring.steps][-1] < totals.steps + 20_000
        next((folder.path / "ranks").iterdir()).unlink()


def test_an_uncaught_exception_is_an_event_before_the_exit(folder: Folder) -> None:
    code = ATTACHED + "raise ValueError('no such layer: ' + 'x' * 500)"
    with program(folder, code) as process:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1
    assert errors.rstrip().endswith("x" * 500)
    event, end = folder.ring().events
    assert (event["event"], event["type"]) == ("exception", "ValueError")
    assert event["detail"] == "no such layer: " + "x" * 85
    assert end == {"event": "exit"}


def test_running_out_of_memory_is_reported_though_it_is_caught(folder: Folder) -> None:
    code = ATTACHED + (
        "class OutOfMemoryError(RuntimeError): pass\n"
        "try:\n"
        "    with monitor.step():\n"
        "        raise OutOfMemoryError('CUDA out of memory')\n"
        "except OutOfMemoryError: pass\n"
    )
    with program(folder, code) as process:
        assert process.wait(20) == 0
    assert folder.ring().events == [
        {"event": "oom", "detail": "CUDA out of memory"},
        {"event": "exit"},
    ]


def test_a_forked_child_leaves_ring_and_lock_to_its_parent(folder: Folder) -> None:
    code = ATTACHED + (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    for _ in range(5):\n"
        "        with monitor.step(samples=1000), monitor.phase('child'): pass\n"
        "    opened = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')\n"
        "              if os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "    maps = open('/proc/self/maps').read()\n"
        "    sys.exit(any('.ring' in name or 'warpwatch' in name for name in opened)\n"
        "             or '.ring' in maps or monitor.clock.ring is not None)\n"
        "_, status = os.waitpid(pid, 0)\n"
        "with monitor.step(samples=1): pass\n"
        "print(os.waitstatus_to_exitcode(status), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with program(folder, code) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "0\n"
        ring = folder.ring()
        assert not ring.header.ended
        assert ring.header.totals.samples == ring.header.totals.steps
        fd = os.open(next((folder.path / "ranks").iterdir()), os.O_RDONLY)
        assert rendezvous.lock_holder(fd) == process.pid
        os.close(fd)
        process.stdin.close()
        assert process.wait(20) == 0
    assert folder.ring().header.ended


def test_a_removed_ring_is_replaced_and_the_totals_go_on(folder: Folder) -> None:
    with program(folder, STEPPING, "-1", "0.005"):
        first = eventually(folder.rings)[0]
        (folder.path / "ranks" / f"{first.name}.ring").unlink()
        second = eventually(folder.rings)[0]
        assert second.name != first.name
        eventually(lambda: folder.ring().header.totals.steps)
        later = folder.ring()
        assert later.header.totals.steps > first.header.totals.steps
        assert later.records[0].type == protocol.RECORD_PHASE


def test_a_daemon_that_comes_later_is_found(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "warpwatch")
    with program(folder, STEPPING, "-1", "0.005"):
        time.sleep(0.3)
        assert folder.rings() == []
        with folder.held():
            eventually(folder.rings)


def test_the_heartbeat_goes_on_while_a_step_lasts(folder: Folder) -> None:
    with program(folder, STEPPING, "-1", "3"):
        first = eventually(folder.rings)[0].header
        eventually(lambda: folder.ring().header.heartbeat_ns > first.heartbeat_ns)
        later = folder.ring().header
        assert later.step_begun == first.step_begun == 0
        assert later.step_begun_ns == first.step_begun_ns > 0


@pytest.mark.parametrize("break_folder", ["link", "no ranks", "lock is a link", "lock is a pipe"])
def test_a_folder_that_is_not_as_it_should_be_gets_no_ring(
    folder: Folder, break_folder: str, tmp_path: Path
) -> None:
    ranks, lock = folder.path / "ranks", folder.path / "daemon.lock"
    if break_folder == "link":
        ranks.rename(tmp_path / "elsewhere")
        ranks.symlink_to(tmp_path / "elsewhere")
    elif break_folder == "no ranks":
        ranks.rmdir()
    else:
        lock.rename(tmp_path / "held.lock")
        if break_folder == "lock is a link":
            lock.symlink_to(tmp_path / "held.lock")
        else:
            os.mkfifo(lock)
    with program(folder, STEPPING, "50", "0.005") as process:
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0
    assert not ranks.exists() or list(ranks.iterdir()) == []


def test_only_a_named_folder_may_be_another_users(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    folder = Folder(tmp_path / "runtime" / "warpwatch")
    for path in (folder.path, folder.path / "daemon.lock", folder.path / "ranks"):
        os.chown(path, 12345, 12345)
    unnamed = {"WARPWATCH_DIR": "", "XDG_RUNTIME_DIR": str(tmp_path / "runtime")}
    with folder.held():
        with program(folder, STEPPING, "40", "0.005", **unnamed) as process:
            assert process.wait(20) == 0
        assert folder.rings() == []
        with program(folder, STEPPING, "40", "0.005") as process:
            assert process.wait(20) == 0
        assert len(folder.rings()) == 1


def test_it_is_silent_and_harmless_when_switched_off(folder: Folder) -> None:
    with program(folder, STEPPING, "50", "0.001", WARPWATCH="0") as process:
        assert process.communicate(timeout=60) == ("", "")
    assert folder.rings() == []


def test_attach_is_idempotent_and_starts_one_thread(folder: Folder) -> None:
    code = ATTACHED + (
        "import threading\n"
        "assert warpwatch.attach(job='other') is monitor\n"
        "print([thread.name for thread in threading.enumerate()])"
    )
    with program(folder, code) as process:
        output, errors = process.communicate(timeout=60)
    assert (output, errors) == ("['MainThread', 'warpwatch']\n", "")
    assert folder.ring().metadata["job"] == "demo"


def test_the_records_of_two_writers_never_share_a_number(folder: Folder) -> None:
    code = ATTACHED + (
        "import threading\n"
        "ring = monitor.clock.ring\n"
        "def help_():\n"
        "    for number in range(400): ring.event('note', number=number)\n"
        "sys.setswitchinterval(1e-5)\n"
        "thread = threading.Thread(target=help_); thread.start()\n"
        "steps = 0\n"
        "while thread.is_alive() and steps < 1000:\n"
        "    with monitor.step(): steps += 1\n"
        "thread.join(); ring.flush(1.0)\n"
    )
    with program(folder, code) as process:
        assert process.communicate(timeout=60) == ("", "")
    ring = folder.ring()
    assert ring.torn == 0
    notes = [event["number"] for event in ring.events if event["event"] == "note"]
    assert notes == list(range(400))
    numbers = [step[0] for step in ring.steps]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_a_full_disk_gets_no_ring_and_no_signal(folder: Folder, tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a small file system")
    ranks = folder.path / "ranks"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(ranks)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("may not mount here")
    try:
        with program(folder, STEPPING, "60", "0.005") as process:
            assert process.communicate(timeout=60) == ("", "")
            assert process.returncode == 0
        assert list(ranks.iterdir()) == []
    finally:
        subprocess.run(["umount", str(ranks)], check=True)


def test_python_3_9_runs_it(folder: Folder) -> None:
    python = shutil.which("python3.9")
    version = {"PYENV_VERSION": "3.9.18"}
    if (
        python is None
        or subprocess.run(
            [python, "-V"], capture_output=True, env={**os.environ, **version}
        ).returncode
    ):
        pytest.skip("there is no python3.9")
    with program(folder, STEPPING, "60", "0.005", python=python, **version) as process:
        assert process.communicate(timeout=60) == ("", "")
    assert folder.ring().header.totals.steps == 60
    assert folder.ring().metadata["python"].startswith("3.9.")


def test_importing_it_brings_no_torch_and_starts_nothing() -> None:
    code = (
        "import sys, threading, warpwatch\n"
        "print('torch' in sys.modules, threading.active_count(), sys.excepthook.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False 1 sys\n", "")


def test_the_lock_of_a_ring_is_taken_once(folder: Folder) -> None:
    with program(folder, STEPPING, "-1", "0.005"):
        eventually(folder.rings)
        with next((folder.path / "ranks").iterdir()).open("r+b") as file, pytest.raises(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)


def test_a_ring_read_while_it_is_written_decodes(folder: Folder) -> None:
    with program(folder, STEPPING, "-1", "0"):
        eventually(folder.rings)
        path = next((folder.path / "ranks").iterdir())
        for _ in range(30):
            assert Ring(path).header.totals.steps >= 0
