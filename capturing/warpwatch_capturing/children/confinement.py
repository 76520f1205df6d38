"""A process that parses a stranger's file: what starts it, and what it gives up before it does.

It opens its files first. Then it has less memory and time, may write little, is no one in
particular where the daemon is root and may become another user, and its system calls are filtered.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Literal

from warpwatch_capturing.children.seccomp import deny_system_calls

logger = logging.getLogger(__name__)

# By the clock, on a machine whose cores are all taken.
TIMEOUT_S = 180.0
# Of a core: some ten times what real traces take.
BASE_CPU_S = 15
CPU_S_PER_MIB = 15
MAX_FILE_BYTES = 16 << 20
# For a process that gives up everything and then ends.
TRIAL_S = 10.0
# Of what it writes to its output, so much is read.
MAX_OUTPUT_BYTES = 64 << 10
# A range that no system gives to users (systemd's "Users, Groups, UIDs and GIDs"), so that no
# process of anybody has the same; else "nobody", where a container has fewer.
_FIRST_UID, _UIDS = 1_900_000_000, 10_000_000
_NOBODY = 65534
# CAP_KILL, without which the daemon could not end it, CAP_SETGID and CAP_SETUID.
_NEEDED_CAPABILITIES = 1 << 5 | 1 << 6 | 1 << 7
# What an interpreter needs. No secret of the daemon's is where hostile bytes are read.
_ENVIRONMENT = re.compile(r"PATH|HOME|TMPDIR|TZ|LANG|(LC|LD|PYTHON|COVERAGE)_?\w*")
READING = "reading "
_UNCONFINED = "unconfined: "


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended. status: negative for a signal, None when it was not done in time.

    lines: of its output.
    """

    status: int | None
    lines: tuple[str, ...]

    @property
    def killed_by(self) -> str | None:
        """Which limit it ran into, as a clause; None: it ended by itself."""
        if self.status is None:
            return "not read in time"
        if self.status == -signal.SIGXCPU:
            return "it takes too long for its size"
        if self.status == -signal.SIGKILL:
            return "it takes too much memory or time"
        return f"it ended by signal {-self.status}" if self.status < 0 else None


# ``run``, or what stands for it.
Run = Callable[[str, Sequence[str], float, Sequence[int]], Ended]


def run(
    module: str,
    arguments: Sequence[str],
    timeout_s: float = TIMEOUT_S,
    pass_fds: Sequence[int] = (),
) -> Ended:
    """Run a module that calls ``confine`` before it reads; blocks. Raises OSError."""
    ended = _run(module, arguments, timeout_s, pass_fds)
    for reason in _unconfined(ended):
        _warn(reason)
    return Ended(ended.status, tuple(x for x in ended.lines if not x.startswith(_UNCONFINED)))


def shortcomings() -> tuple[str, ...]:
    """What such a process would not have given up, by its own trial. Raises OSError."""
    return _unconfined(_run(__name__, (), TRIAL_S, ()))


def _run(module: str, arguments: Sequence[str], timeout_s: float, pass_fds: Sequence[int]) -> Ended:
    # -P: the folder that the daemon was started in is no place to import from.
    command = [sys.executable, "-P", "-m", module, *arguments]
    # A pipe could be filled faster than the limit of a file's size allows.
    with os.fdopen(os.memfd_create("output"), "w+b") as output:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=timeout_s,
                pass_fds=pass_fds,
                env={k: v for k, v in os.environ.items() if _ENVIRONMENT.fullmatch(k)},
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = None
        return Ended(status, tuple(_lines(output)))


def _unconfined(ended: Ended) -> tuple[str, ...]:
    """What could not be given up, and why."""
    said = (line for line in ended.lines if line.startswith(_UNCONFINED))
    return tuple(line.removeprefix(_UNCONFINED) for line in said)


def _lines(output: BinaryIO) -> list[str]:
    size = os.fstat(output.fileno()).st_size
    start = max(0, size - MAX_OUTPUT_BYTES)
    return os.pread(output.fileno(), MAX_OUTPUT_BYTES, start).decode(errors="replace").splitlines()


@lru_cache(maxsize=8)
def _warn(reason: str) -> None:
    """Once for each reason."""
    logger.warning("traces are read with less protection than there should be: %s", reason[:200])


class OpenedFile:
    """Stands for a Path whose file was opened before its process was confined.

    Says on the output when it is read, for whoever wants to know which file was the last.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._opened: BinaryIO | OSError
        try:
            self._opened = path.open("rb")
        except OSError as error:
            self._opened = error

    def open(self, mode: Literal["rb"], /) -> BinaryIO:
        """Once only. Raises OSError when it could not be opened."""
        _say(f"{READING}{self.name}")
        if isinstance(self._opened, OSError):
            raise self._opened
        return self._opened

    def __str__(self) -> str:
        return self.name


def cpu_limit_s(paths: Sequence[Path]) -> int:
    """What reading these files may take of a core; a file that is gone takes nothing."""
    size = sum(path.stat().st_size for path in paths if path.is_file())
    return min(int(TIMEOUT_S), BASE_CPU_S + (size * CPU_S_PER_MIB >> 20))


def confine(memory_bytes: int, cpu_s: int) -> None:
    """Give up what is not needed to read files that are open already.

    Nothing can be imported any more.
    """
    # Counter.most_common imports it when it is first called.
    import heapq  # noqa: F401

    # The soft limit of the time ends it; the hard one is for who ignores the signal.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)
    for give_up in (_become_no_one, deny_system_calls):
        try:
            give_up()
        except OSError as error:
            _say(f"{_UNCONFINED}{give_up.__name__.strip('_')}: {error.strerror}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _become_no_one() -> None:
    """Another user, where root may; without capabilities root is little more than one."""
    if os.geteuid() != 0 or _capabilities() & _NEEDED_CAPABILITIES != _NEEDED_CAPABILITIES:
        return
    os.setgroups([])
    try:
        _become(_FIRST_UID + os.getpid() % _UIDS)
    except OSError:
        _become(_NOBODY)


def _become(uid: int) -> None:
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _capabilities() -> int:
    """The effective ones, as bits."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff")), 0)


if __name__ == "__main__":
    confine(1 << 30, BASE_CPU_S)
