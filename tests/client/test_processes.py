"""The shim in real processes: what it leaves in the ring, and what it leaves alone."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from select import select

import pytest

import warpwatch
from tests import locks
from tests.cases import cases
from tests.client.daemon_side import Folder, Ring, program
from tests.client.training import training
from tests.waiting import DEADLINE_S, eventually
from warpwatch import protocol, rendezvous

CASES = cases(__file__)

ASKING = CASES["asking"]


class Asking:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def has_ring(self, how: str = "step") -> bool:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{how}\n")
        self._process.stdin.flush()
        assert select([self._process.stdout], [], [], DEADLINE_S)[0], "it does not return"
        return self._process.stdout.readline() == "True\n"


@contextmanager
def asking(folder: Folder, **environ: str) -> Iterator[Asking]:
    with program(folder, ASKING, **environ) as process:
        assert isinstance(process, subprocess.Popen)
        yield Asking(process)


def ring_file(folder: Folder) -> Path:
    (path,) = (folder.path / "ranks").iterdir()
    return path


def has_steps(path: Path, enough: int) -> bool:
    return Ring(path).header.totals.steps >= enough


def test_steps_before_the_ring_are_in_the_totals(folder: Folder) -> None:
    with training(folder) as found:
        found.steps(20)
        found.end()
    ring, steps = folder.ring(), found.number
    totals = ring.header.totals
    assert ring.header.ended
    assert (totals.steps, totals.newest_step) == (steps, steps - 1)
    assert (totals.samples, totals.tokens) == (4 * steps, 10 * steps)
    assert ring.metadata["phases"] == ["forward"]
    assert 0 < totals.phases_ns[0] <= totals.duration_ns
    assert ring.events == [{"event": "exit"}]
    numbers = [step[0] for step in ring.steps]
    assert numbers == list(range(numbers[0], steps))
    assert ring.header.step_begun == steps - 1
    # Wall clocks: times since the epoch.
    created = ring.header.identity
    assert created.created_monotonic_ns < 10**18 < created.created_wall_ns
    assert min(record.wall_ns for record in ring.records) > 10**18
    number, duration_ns, gpu_ns, allocated, samples, tokens, forward_ns, flags = ring.steps[-1]
    assert (number, samples, tokens, flags) == (steps - 1, 4, 10, 0)
    assert gpu_ns == allocated == protocol.ABSENT
    assert 0 < forward_ns <= duration_ns


def test_a_ring_is_whole_readable_and_locked_by_its_process(folder: Folder) -> None:
    with training(folder, define="os.umask(0o077)") as found:
        path, pid = ring_file(folder), found.process.pid
        status = path.stat()
        assert status.st_mode & 0o777 == 0o644
        # No holes: a write into one would kill the process when the disk is full.
        assert status.st_blocks * 512 >= status.st_size == protocol.RING_SIZE
        with path.open("r+b") as file:
            assert rendezvous.lock_holder(file.fileno()) == pid
            with pytest.raises(OSError):
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        identity = folder.ring().header.identity
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        assert (identity.pid, identity.process_start) == (pid, int(ticks))
        found.process.kill()
        found.process.wait()
        with path.open("rb") as file:
            assert rendezvous.lock_holder(file.fileno()) is None


def test_a_daemon_of_root_is_trusted_and_one_of_another_user_is_not(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder.path)
    opened = len(os.listdir("/proc/self/fd"))
    own = os.geteuid()
    for path, uid in ((folder.path, own), (folder.path, 4242), (link, own), (tmp_path, own)):
        monkeypatch.setattr(rendezvous, "SYSTEM_DIR", str(path))
        found = rendezvous.find_daemon({}, uid)
        assert (found is not None) == (path == folder.path and own in (0, uid))
        if found is not None:
            found.close()
    assert len(os.listdir("/proc/self/fd")) <= opened


def test_two_ranks_are_two_rings(folder: Folder) -> None:
    """Intervals that make no sense are as if they were not given."""
    about = {"WORLD_SIZE": "2", "WARPWATCH_JOB": "demo"}
    for rank, interval_s in (("0", "soon"), ("1", "-1")):
        about |= {"RANK": rank, "WARPWATCH_ATTACH_INTERVAL_S": interval_s}
        with program(folder, ASKING, **about) as process:
            assert process.communicate("step\n", timeout=DEADLINE_S) == ("True\n", "")
    reported = [(ring.metadata["rank"], ring.metadata["world_size"]) for ring in folder.rings()]
    assert sorted(reported) == [(0, 2), (1, 2)]
    assert all(ring.name.startswith(f"demo-r{ring.metadata['rank']}-") for ring in folder.rings())


def test_a_killed_writer_leaves_a_ring_that_reads_cleanly(folder: Folder) -> None:
    for enough in (1, 300, 1000, 4000):
        with training(folder) as found:
            found.request(10**9)
            path = ring_file(folder)
            # Read while it is written, it decodes as well.
            eventually(partial(has_steps, path, enough))
            os.kill(found.process.pid, signal.SIGKILL)
            found.process.wait()
        ring = Ring(path)
        totals = ring.header.totals
        assert (ring.torn, ring.header.ended) == (0, False)
        assert ring.header.step_begun is not None
        assert totals.samples == totals.steps * 4
        # Short steps are settled together: their records first, then the totals.
        assert totals.steps - 1 <= [step[0] for step in ring.steps][-1] < totals.steps + 20_000
        path.unlink()


@pytest.mark.parametrize("case", CASES["ends"].values(), ids=CASES["ends"])
def test_an_exception_that_ends_a_program_is_an_event(folder, case):
    define = "WHY = 'no such layer: ' + 'x' * 500"
    with training(folder, define=define, main=case.get("main", "serve()")) as found:
        found.request(1, case["end"])
        errors = found.process.communicate(timeout=DEADLINE_S)[1]
        assert found.process.returncode == case.get("status", 0)
    assert ("Traceback" in errors) == case.get("shown", False), errors
    ring = folder.ring()
    assert ring.header.ended == case.get("ended", True)
    assert [event.get("type", event["event"]) for event in ring.events] == case["events"]
    details = {event["detail"] for event in ring.events if "detail" in event}
    assert details <= {"no such layer: " + "x" * 85}


def test_running_out_of_memory_is_reported_though_it_is_caught(folder: Folder) -> None:
    after = (
        "class OutOfMemoryError(RuntimeError): pass\n"
        "serve()\n"
        "try:\n"
        "    with monitor.step(): raise OutOfMemoryError('CUDA out of memory')\n"
        "except OutOfMemoryError: pass\n"
    )
    with training(folder, main=after) as found:
        found.end()
    out_of_memory = {"event": "oom", "detail": "CUDA out of memory"}
    assert folder.ring().events == [out_of_memory, {"event": "exit"}]


def test_a_forked_child_leaves_ring_and_lock_to_its_parent(folder: Folder) -> None:
    with training(folder) as found:
        found.steps(2, CASES["fork"])
        eventually(lambda: folder.ring().header.totals.steps == found.number)
        ring = folder.ring()
        assert not ring.header.ended
        assert ring.header.totals.samples == 4 * found.number
        with ring_file(folder).open("rb") as file:
            assert rendezvous.lock_holder(file.fileno()) == found.process.pid
        found.end()
    assert folder.ring().header.ended


def test_the_heartbeat_goes_on_while_a_step_lasts(folder: Folder) -> None:
    with training(folder) as found:
        found.request(1, "sys.stdin.readline()")
        begun = eventually(lambda: folder.ring().header.step_begun == found.number)
        first = folder.ring().header
        eventually(lambda: folder.ring().header.heartbeat_ns > first.heartbeat_ns)
        later = folder.ring().header
        assert begun and later.step_begun == first.step_begun
        assert later.step_begun_ns == first.step_begun_ns > 0


def test_a_daemon_that_comes_later_is_found_by_a_process_that_takes_steps(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "warpwatch")
    with asking(folder) as process:
        assert not process.has_ring()
        with folder.held():
            assert process.has_ring()
    with folder.held(), asking(folder) as process:
        # Without steps it is not a rank.
        assert not process.has_ring("no step")
        assert process.has_ring()


def test_a_folder_that_is_not_as_it_should_be_gets_no_ring(folder: Folder, tmp_path: Path) -> None:
    ranks, lock = folder.path / "ranks", folder.path / "daemon.lock"
    elsewhere = tmp_path / "elsewhere"
    with asking(folder) as process:
        for path in (ranks, lock):
            path.rename(elsewhere)
            assert not process.has_ring(), f"no {path.name}"
            path.symlink_to(elsewhere)
            assert not process.has_ring(), f"{path.name} is a link"
            path.unlink()
            if path == lock:
                os.mkfifo(lock)
                assert not process.has_ring(), "the lock is a pipe"
                lock.unlink()
            elsewhere.rename(path)
        assert list(ranks.iterdir()) == []
        assert process.has_ring()


def test_only_a_named_folder_may_be_another_users(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    folder = Folder(tmp_path / "runtime" / "warpwatch")
    unnamed = {"WARPWATCH_DIR": "", "XDG_RUNTIME_DIR": str(tmp_path / "runtime")}
    with folder.held():
        for path in (folder.path, folder.path / "daemon.lock"):
            os.chown(path, 12345, 12345)
            assert rendezvous.find_daemon(unnamed, 0) is None
            os.chown(path, 0, 0)
    for path in (folder.path, folder.path / "daemon.lock", folder.path / "ranks"):
        os.chown(path, 12345, 12345)
    with folder.held():
        with asking(folder, **unnamed) as process:
            assert not process.has_ring()
        with asking(folder) as process:
            assert process.has_ring()


def test_a_full_disk_gets_no_ring_and_no_signal(folder: Folder) -> None:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a small file system")
    ranks = folder.path / "ranks"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(ranks)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("may not mount here")
    try:
        with program(folder, ASKING) as process:
            assert process.communicate("step\n", timeout=DEADLINE_S) == ("False\n", "")
            assert process.returncode == 0
        assert list(ranks.iterdir()) == []
    finally:
        subprocess.run(["umount", str(ranks)], check=True)


def test_it_is_silent_and_harmless_when_switched_off(folder: Folder) -> None:
    """Also where Python has no fcntl, as on Windows."""
    code = "import sys, threading\nsys.modules['fcntl'] = None\nimport warpwatch\n"
    code += "with warpwatch.attach().step(): pass\n"
    code += "print(threading.active_count(), 'torch' in sys.modules, sys.excepthook.__module__)"
    with program(folder, code, WARPWATCH="0") as process:
        assert process.communicate(timeout=DEADLINE_S) == ("1 False sys\n", "")
    # An error of the shim does not count as the program's.
    broken = "import warpwatch.helper_thread as helper\nhelper.HelperThread = None\n"
    with program(folder, f"{broken}{code}") as process:
        assert process.communicate(timeout=DEADLINE_S)[0].startswith("1 False ")
    assert folder.rings() == []


def test_attach_is_idempotent_and_starts_one_thread(folder: Folder) -> None:
    with training(folder) as found:
        found.steps(
            1,
            "assert warpwatch.attach(job='other') is monitor\n"
            "names = [thread.name for thread in threading.enumerate()]\n"
            "assert names == ['MainThread', 'warpwatch'], names\n",
        )
        assert folder.ring().metadata["job"] == "demo"


def test_a_thread_waits_for_another_that_attaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPWATCH", "0")
    module = sys.modules["warpwatch.attach"]
    monkeypatch.setattr(module, "_monitor", None)
    monkeypatch.setattr(module, "_guard", locks.held())
    with pytest.raises(locks.Waits):
        warpwatch.attach()


def test_the_records_of_two_writers_never_share_a_number(folder: Folder) -> None:
    write = (
        "ring = monitor.clock.ring\n"
        "def help_():\n"
        "    for number in range(400): ring.event('note', number=number)\n"
        "sys.setswitchinterval(1e-5)\n"
        "thread = threading.Thread(target=help_); thread.start()\n"
    )
    with training(folder) as found:
        found.steps(1000, write)
        found.steps(1, "thread.join(); ring.flush(1.0)")
        found.end()
    ring = folder.ring()
    assert ring.torn == 0
    notes = [event["number"] for event in ring.events if event["event"] == "note"]
    assert notes == list(range(400))
    numbers = [step[0] for step in ring.steps]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_python_3_9_runs_it(folder: Folder) -> None:
    python = shutil.which("python3.9")
    version = {"PYENV_VERSION": "3.9.18"}
    environ = {**os.environ, **version}
    if (
        python is None
        or subprocess.run([python, "-V"], capture_output=True, env=environ).returncode
    ):
        pytest.skip("there is no python3.9")
    with program(folder, ASKING, python=python, **version) as process:
        assert process.communicate("step\nstep\n", timeout=DEADLINE_S) == ("True\nTrue\n", "")
    assert folder.ring().header.totals.steps == 2
    assert folder.ring().metadata["python"].startswith("3.9.")


NEW_RING = "wait(lambda: monitor.clock.ring not in (None, first))"


def test_a_program_that_closes_everything_gets_another_ring(folder: Folder, tmp_path: Path) -> None:
    path = str(tmp_path / "mine")
    with training(folder) as found:
        first = folder.ring().name
        found.steps(1, CASES["closes_all"].format(path=path))
        found.steps(1, NEW_RING)
        found.steps(1, CASES["closed"].format(path=path))
        (new,) = (ring.name for ring in folder.rings() if ring.name != first)
        ring = folder.path / "ranks" / f"{new}.ring"
        eventually(lambda: Ring(ring).header.totals.steps == found.number)
